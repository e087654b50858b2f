# The programs for CPUs, in a container. This file has been checked by a linter; nobody has built it yet.
#   docker build -t llama3 .
#   docker run --rm --shm-size 8g -v "$PWD/data:/llama3/data" -v "$PWD/out:/llama3/out" llama3 \
#       ./train_llama3 --ranks 2 --model tiny --data data/train.tok --steps 400 --out out/a
# The programs are built for the processor that builds the image, in the precision that is fast there:
# --build-arg ARCH=x86-64-v3 --build-arg PRECISION=fp32 builds for others.
FROM debian:12
ARG ARCH=native
ARG PRECISION=
# git is for the commit that --version prints; openssh-client is what mpirun starts ranks on other hosts with.
# hadolint ignore=DL3008 # the packages of the distribution, in the versions that it has today
RUN apt-get update && \
    apt-get install -y --no-install-recommends ca-certificates git make gcc libc6-dev openssh-client && \
    rm -rf /var/lib/apt/lists/*
WORKDIR /llama3
COPY . .
RUN make deps && \
    make CUDA= ARCH="$ARCH" ${PRECISION:+PRECISION="$PRECISION"} && \
    rm -rf /var/lib/apt/lists/*
# Open MPI refuses to start as root, which is the user here, without these two.
ENV OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
CMD ["./train_llama3", "--help"]
