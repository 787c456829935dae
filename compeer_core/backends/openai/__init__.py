"""Policies and judges behind OpenAI-compatible endpoints: vLLM, SGLang, llama.cpp, Ollama, or hosted."""
