# The demo on a CPU, with the models in this repository. docs/serving.md explains it.
FROM python:3.11-slim

RUN useradd --create-home --uid 1000 compeer \
    && install --directory --owner=compeer --mode=700 /data
WORKDIR /app

# The list by itself first: a change of the code installs nothing anew.
COPY requirements.lock ./
RUN pip install --no-cache-dir --require-hashes --extra-index-url https://download.pytorch.org/whl/cpu \
    --requirement requirements.lock

COPY LICENSE app.py ./
COPY assets ./assets
COPY compeer_core ./compeer_core
COPY ui_components ./ui_components

ENV COMPEER_DATA_DIR=/data \
    GRADIO_SERVER_NAME=0.0.0.0 \
    GRADIO_SERVER_PORT=7860 \
    HF_HOME=/data/huggingface \
    PYTHONUNBUFFERED=1
USER 1000
VOLUME /data
EXPOSE 7860
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen('http://127.0.0.1:' + os.environ['GRADIO_SERVER_PORT'] + '/healthz', timeout=4)"]
ENTRYPOINT ["python", "app.py"]
