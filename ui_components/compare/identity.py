"""Detects replies that reveal their model, because the vote is then no longer blind.

`says_who_wrote_it` searches for the names in the model list, and for sentences in which a writer
introduces itself as a known model or a product of its maker. It does not recognise style, and a
reply that only mentions a model ("so you asked ChatGPT first") is not flagged.
"""

import re
import unicodedata
from collections.abc import Iterable

MODELS = (
    "compeer", "unifireward", "chatgpt", "gpt", "claude", "gemini", "gemma", "llama", "mistral",
    "mixtral", "qwen", "deepseek", "kimi", "glm", "chatglm", "baichuan", "internlm", "ernie", "ernie bot",
    "doubao", "hunyuan", "minimax", "copilot", "grok", "emollm", "soulchat", "mechat", "psychat",
    "blenderbot", "llava",
)  # fmt: skip
MAKERS = (
    "openai", "anthropic", "google", "deepmind", "meta", "meta ai", "mistral ai", "alibaba",
    "alibaba cloud", "deepseek", "moonshot", "zhipu", "baidu", "bytedance", "tencent", "microsoft", "xai",
)  # fmt: skip
CHINESE = (
    "通义", "千问", "文心", "豆包", "混元", "智谱", "清言", "百川", "书生", "月之暗面", "深度求索", "阿里",
    "百度", "腾讯", "字节跳动", "谷歌", "微软", "讯飞", "星火",
)  # fmt: skip

_NAME_IS = r"\b(?:i am|i m|im|my name is|call me|this is|i go by)(?: called| named)? "
_I_AM = (
    r"\b(?:i am|i m|im|my name is|call me|this is|you are talking to|speaking as) "
    r"(?:(?:an?|the|your|called|named|known|as|just|actually|really|ai|large|language|model|assistant|"
    r"chatbot|supporter|based|on) ){0,8}?"
)
_MADE_BY = r"\b(?:made|built|created|developed|trained|designed|released) (?:by|at) "
_ITSELF = (
    r"\b(?:i (?:am|m|was|have been)|im|as an? (?:\w+ ){0,3}?(?:model|assistant|ai))\b[^.!?]{0,40}?"
)
_I_AM_CHINESE = r"(?:我是|我叫|我的名字是|我的名字叫|本人是|作为)(?!不)[^。！？,，.!?]{0,8}?"


def says_who_wrote_it(text: str, names: Iterable[str], message: str = "") -> bool:
    """Return whether a reply names its writer.

    Args:
        text: The reply, and whatever else of the turn is shown.
        names: Names and titles in the model list.
        message: The seeker's message; a name in it may be repeated in a reply.

    Example:
        >>> says_who_wrote_it("I'm Qwen, made by Alibaba Cloud.", [])
        True
        >>> says_who_wrote_it("So you asked ChatGPT before you came here.", ["compeer-small"])
        False
    """
    plain, question = _plain(text), _plain(message)
    listed = {_plain(name) for name in names} - {""}
    # A single plain word, such as "base", is not treated as a name.
    words = {name for name in listed if name.isalpha() and name.isascii()}
    if any(name not in question and _stands(name, plain) for name in listed - words):
        return True
    latin = _any({*MODELS, *listed})
    introduces = (
        rf"{_NAME_IS}{_any(words)}(?![a-z])" if words else r"(?!)",
        rf"{_I_AM}{_any(MODELS)}(?![a-z])",
        rf"{_ITSELF}{_MADE_BY}{_any(MAKERS)}(?![a-z])",
        rf"{_I_AM_CHINESE}(?:{_any(CHINESE)}|{latin})",
    )
    return any(re.search(pattern, plain) for pattern in introduces)


def _plain(text: str) -> str:
    """Return a text in lower case without invisible characters; punctuation becomes spaces."""
    unified = unicodedata.normalize("NFKC", text).casefold()
    seen = "".join(sign for sign in unified if unicodedata.category(sign) != "Cf")
    return " ".join(re.sub(r"[^\w.。!?,，]+|_|(?<=\d)\.(?=\d)", " ", seen).split())


def _any(names: Iterable[str]) -> str:
    return f"(?:{'|'.join(map(re.escape, sorted(names, key=len, reverse=True)))})"


def _stands(name: str, text: str) -> bool:
    return re.search(rf"(?<![a-z0-9]){re.escape(name)}(?![a-z0-9])", text) is not None
