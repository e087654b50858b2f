# cuda.mk: builds with CUDA, and with the emulator of dev/cuda_on_cpu. The Makefile includes it.
## make cuda-on-cpu   train_llama3_cuda and its test in the emulator (dev/cuda_on_cpu), both precisions
## make gpu-programs  everything that dev/gpu_check.sh runs on a machine with a GPU, to which build/ may be copied
NVCC  := $(call program,nvcc /usr/local/cuda/bin/nvcc)
CUDA  ?= $(if $(NVCC),1)
CUDA_PRECISION := $(if $(filter command line environment,$(origin PRECISION)),$(PRECISION),bf16)
CUDA_BUILD := build/cuda-$(CUDA_PRECISION)
# machine code for Ampere and Hopper, and PTX for later GPUs; 90a has instructions that no later GPU has
CUDA_CODE  := $(foreach a,80 90a,-gencode arch=compute_$(a)$(comma)code=sm_$(a)) \
              -gencode arch=compute_90,code=compute_90 -t 2
# -ftz=true: fp32 numbers below 1.2e-38 count as zero, which saves three instructions in each exponential and some in
# each division and square root. What trains never depends on them: AdamW's eps is 30 orders of magnitude larger.
CUDA_FLAGS := -x cu -std=c++20 -O3 -ftz=true -DUSE_CUDA $(CUDA_CODE) -Xptxas -v,-warn-spills,-warn-lmem-usage,-Werror \
              -Xcompiler -fopenmp,-march=$(ARCH),-ffp-contract=fast,-fno-math-errno \
              $(if $(filter bf16,$(CUDA_PRECISION)),-DPRECISION_BF16)
CUDA_LIBS  := -lcublasLt -lcjson -lpcre2-8 -lz -lm \
              $(addprefix -Xlinker ,$(subst -Wl$(comma),,$(subst rpath$(comma),rpath=,$(DEPS_LINK))))
# Several GPUs need NCCL, and several hosts MPI to start on them. Tests of the CUDA build need neither.
NCCL_PLACES := $(dir $(NVCC))../include /usr/include /usr/local/include $(NCCL_HOME)/include
HAVE_NCCL   := $(if $(NVCC),$(if $(wildcard $(NCCL_PLACES:=/nccl.h)),1))
ifneq ($(HAVE_NCCL),)
CUDA_FLAGS += -DHAVE_NCCL $(NCCL_HOME:%=-I%/include)
CUDA_LIBS  += $(NCCL_HOME:%=-L%/lib) -lnccl
endif
CUDA_MPI   := $(if $(HAVE_MPI),-DHAVE_MPI $(filter-out -pthread,$(MPI_CFLAGS)) $(filter -L% -l%,$(MPI_LIBS)))
NO_NVCC    := error: CUDA=1 needs nvcc, of NVIDIA's CUDA toolkit; it is not in the PATH or in /usr/local/cuda/bin

# The emulator runs the same kernels as functions of this processor. -O3 would take twice as long to compile, and they
# would run no faster. -fsanitize=thread is for compiling alone: its hooks
# are in dev/cuda_on_cpu.
CPU_CUDA_BUILD := build/cuda-on-cpu-$(PRECISION)
CPU_CUDA_FLAGS := -x c++ -Wno-uninitialized -Wno-maybe-uninitialized -std=c++20 -DUSE_CUDA -DHAVE_NCCL \
                  -Idev/cuda_on_cpu -Wno-unknown-pragmas -Wno-aggressive-loop-optimizations -O1 \
                  $(filter-out -O% -std=% -x c -DHAVE_MPI -DHAVE_ONEDNN $(MPI_CFLAGS),$(FLAGS)) \
                  $(filter-out -O3,$(filter -g -O% -fsanitize%,$(CFLAGS)))
link_on_cpu = $(CXX) -fopenmp $(filter -fsanitize=address%,$(CFLAGS)) $(or $(filter %.o,$^),$@.o) -o $@ -lcjson \
    -lpcre2-8 -lz -lm -pthread

train_llama3_cuda: $(CUDA_BUILD)/train_llama3_cuda
	@ln -sf $< $@
	@echo "built $< ($(CUDA_PRECISION))"
	@$(if $(HAVE_NCCL),,echo "  without NCCL: one GPU")
	@$(if $(HAVE_MPI),,$(if $(HAVE_NCCL),echo \
	    "  without MPI: the GPUs of one host$(comma) --ranks N"))

CUDA_PROGRAMS := train_llama3_cuda test_llama3_cuda
# built by name, such as build/cuda-bf16/eval_llama3_cuda
CUDA_OTHERS   := $(addsuffix _llama3_cuda,generate eval convert plan) check_hosts_cuda
CUDA_TESTS    := $(addsuffix _llama3_cuda,test_generate test_eval test_convert test_plan)
CUDA_LINKED   := $(CUDA_PROGRAMS) $(CUDA_OTHERS) $(CUDA_TESTS)
vpath %.cu programs dev/test
# What ptxas says about each kernel, its registers and shared memory, stays next to the program.
$(CUDA_BUILD)/%_cuda.o: %.cu $(CUDA_BUILD)/flags | needed
	@$(if $(NVCC),,echo "$(NO_NVCC)" >&2; exit 1)
	$(NVCC) $(CUDA_FLAGS) $(if $(findstring test,$(@F)),,$(filter-out -L% -l%,$(CUDA_MPI))) $(depend) -c $< -o $@ \
	    2> $(@:.o=.ptxas) || \
	    { cat $(@:.o=.ptxas) >&2; exit 1; }

$(CUDA_LINKED:%=$(CUDA_BUILD)/%): %: %.o
	$(NVCC) -Xcompiler -fopenmp $(filter %.o,$^) -o $@ $(CUDA_LIBS) \
	    $(if $(findstring test,$(@F)),,$(filter -L% -l%,$(CUDA_MPI)))

$(CPU_CUDA_BUILD)/%_cuda.o: %.cu $(CPU_CUDA_BUILD)/flags | needed
	$(CXX) $(CPU_CUDA_FLAGS) -Wno-unused-function $(if $(findstring test,$(@F)),-Wno-format-overflow) $(depend) \
	    -c $< -o $@

$(CUDA_LINKED:%=$(CPU_CUDA_BUILD)/%): %: %.o
	$(link_on_cpu)

$(addprefix $(CUDA_BUILD)/,train_llama3_cuda $(CUDA_OTHERS)): $(CUDA_BUILD)/commit.o
$(addprefix $(CPU_CUDA_BUILD)/,train_llama3_cuda $(CUDA_OTHERS)): $(CPU_CUDA_BUILD)/commit.o
$(CUDA_LINKED:%=$(CUDA_BUILD)/%): $(CUDA_BUILD)/pages.o
$(CUDA_LINKED:%=$(CPU_CUDA_BUILD)/%): $(CPU_CUDA_BUILD)/pages.o

# Several processes: NCCL over MPI, for the way a run starts under mpirun and srun
MPI_CUDA_BUILD := build/cuda-on-mpi-$(PRECISION)
$(MPI_CUDA_BUILD)/flags: HOW = $(CXX) $(CPU_CUDA_FLAGS) $(MPI_CFLAGS)
$(MPI_CUDA_BUILD)/train_llama3_cuda: train_llama3.cu $(MPI_CUDA_BUILD)/flags $(MPI_CUDA_BUILD)/commit.o \
        $(MPI_CUDA_BUILD)/pages.o | needed
	$(CXX) $(CPU_CUDA_FLAGS) -DHAVE_MPI -DCUDA_ON_CPU_PROCESSES $(MPI_CFLAGS) -Wno-unused-function $(depend) \
	    -c $< -o $@.o
	$(CXX) -fopenmp $@.o $(filter %.o,$^) -o $@ $(MPI_LIBS) -lcjson -lpcre2-8 -lz -lm -pthread

# the program with times, op by op and step by step; dev/gpu_check.sh runs it
$(CUDA_BUILD)/bench_gpu: dev/kernels/bench_gpu.cu $(CUDA_BUILD)/pages.o $(CUDA_BUILD)/flags | needed
	$(NVCC) $(CUDA_FLAGS) -I. $(depend) -c $< -o $@.o 2> $@.ptxas || { cat $@.ptxas >&2; exit 1; }
	$(NVCC) -Xcompiler -fopenmp $@.o $(CUDA_BUILD)/pages.o -o $@ $(CUDA_LIBS)

$(CPU_CUDA_BUILD)/bench_gpu.o: dev/kernels/bench_gpu.cu $(CPU_CUDA_BUILD)/flags | needed
	$(CXX) $(CPU_CUDA_FLAGS) -Wno-unused-function -Wno-format-overflow -I. $(depend) -c $< -o $@

$(CPU_CUDA_BUILD)/bench_gpu: %: %.o $(CPU_CUDA_BUILD)/pages.o
	$(link_on_cpu)

# NCCL with one rank; a program of its own, because the others must run where NCCL is not
$(CUDA_BUILD)/nccl_check: dev/kernels/nccl_check.cu
	@mkdir -p $(@D)
	$(NVCC) -x cu -std=c++20 -O2 $(CUDA_CODE) $< -o $@ $(NCCL_HOME:%=-I%/include -L%/lib) -lnccl

$(CPU_CUDA_BUILD)/nccl_check: dev/kernels/nccl_check.cu $(CPU_CUDA_BUILD)/flags
	$(CXX) $(CPU_CUDA_FLAGS) $(depend) -c $< -o $@.o
	$(CXX) $@.o -o $@ -pthread

cuda-programs: $(addprefix $(CUDA_BUILD)/,$(CUDA_PROGRAMS) generate_llama3_cuda eval_llama3_cuda) \
               $(if $(filter bf16,$(CUDA_PRECISION)),$(CUDA_BUILD)/bench_gpu)
cuda-on-cpu-programs: $(addprefix $(CPU_CUDA_BUILD)/,$(CUDA_PROGRAMS) $(CUDA_TESTS) \
                          $(addsuffix _llama3_cuda,generate eval convert)) \
                      $(if $(filter bf16,$(PRECISION)),$(addprefix $(CPU_CUDA_BUILD)/,bench_gpu nccl_check))
cuda-on-cpu:
	@$(MAKE) --no-print-directory -j$(JOBS) PRECISION=fp32 cuda-on-cpu-programs
	@$(MAKE) --no-print-directory -j$(JOBS) PRECISION=bf16 cuda-on-cpu-programs

# everything that dev/gpu_check.sh runs, for a machine with one GPU but neither compiler nor MPI, to which build/ is
# copied; libraries are installed as new files, not overwritten, because a program may have them open
GPU_HOST := CUDA=1 ARCH=x86-64-v3
gpu-programs:
	@$(MAKE) --no-print-directory -j$(JOBS) $(GPU_HOST) HAVE_MPI= HAVE_NCCL= PRECISION=bf16 cuda-programs
	@$(MAKE) --no-print-directory -j$(JOBS) $(GPU_HOST) HAVE_MPI= HAVE_NCCL= PRECISION=fp32 cuda-programs
	@$(if $(HAVE_NCCL),$(MAKE) --no-print-directory $(GPU_HOST) PRECISION=bf16 build/cuda-bf16/nccl_check)
	@$(if $(and $(HAVE_NCCL),$(HAVE_MPI)),$(MAKE) --no-print-directory $(GPU_HOST) PRECISION=bf16 \
	    CUDA_BUILD=build/cuda-nccl-bf16 "CUDA_CODE=-gencode arch=compute_90a$(comma)code=sm_90a" \
	    build/cuda-nccl-bf16/train_llama3_cuda && bash dev/portable_mpi.sh build/openmpi, \
	    echo "  without NCCL or MPI here: the stage nccl-ranks is left out")
	@$(MAKE) --no-print-directory PRECISION=fp32 build/cpu-fp32/train_llama3
	@bash dev/gpu_check.sh --function loss_curve_on_cpu
	@$(MAKE) --no-print-directory -j$(JOBS) -C dev/kernels $(GPU_HOST) CUDA_ARCH=sm_90a cuda-pages
	@mkdir -p build/lib
	@ldd build/cuda-bf16/train_llama3_cuda | awk '/libcjson|libpcre2|libz|libgomp/ {print $$3}' | \
	    xargs -I{} install -m 644 {} build/lib/
	@git rev-parse --short HEAD > build/commit

.PHONY: cuda-programs cuda-on-cpu cuda-on-cpu-programs gpu-programs
