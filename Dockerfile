# docker build -t sft-play .                          PyPI's torch, with CUDA 13
# docker build -t sft-play --build-arg TORCH=cpu .    or cu126, cu130: docs/install.md
# docker run --rm -it --gpus all --ipc=host -v "$PWD/outputs:/sft-play/outputs" sft-play train
FROM python:3.12-slim

# Triton compiles launchers with gcc, DeepSpeed's optimizers with g++ and ninja
RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential git make \
    && rm -rf /var/lib/apt/lists/*

# What is downloaded and compiled: a volume here outlives the container
ENV HF_HOME=/cache/huggingface TRITON_CACHE_DIR=/cache/triton

WORKDIR /sft-play
COPY . .
ARG TORCH=
RUN make install ${TORCH:+TORCH=$TORCH}

ENTRYPOINT ["make"]
CMD ["help"]
