# ops.mk: the ops of lib/ops/ops.h as a shared library for PyTorch (dev/pytorch/llama3_ops.py). Part of the Makefile.
# build/libllama3_ops.so has both precisions; build/libllama3_ops_cuda.so, if nvcc is installed, has them for GPUs.
## make ops        the ops as a shared library for PyTorch; make ops-deps installs what it needs, make ops-test tests it
OPS_FLAGS := -fPIC -fvisibility=hidden -Wno-unused-function
OPS_IN     = $(foreach p,fp32 bf16,build/$(1)-$(p)/ops_library.o)

$(BUILD)/ops_library.o: dev/pytorch/ops_library.cu $(BUILD)/flags
	$(CC) -x c $(FLAGS) $(OPS_FLAGS) $(depend) -c $< -o $@

$(CUDA_BUILD)/ops_library.o: dev/pytorch/ops_library.cu $(CUDA_BUILD)/flags
	@$(if $(NVCC),,echo "$(NO_NVCC)" >&2; exit 1)
	$(NVCC) $(CUDA_FLAGS) -Xcompiler -fPIC,-fvisibility=hidden $(depend) -c $< -o $@ 2> $(@:.o=.ptxas) || \
	    { cat $(@:.o=.ptxas) >&2; exit 1; }

$(CPU_CUDA_BUILD)/ops_library.o: dev/pytorch/ops_library.cu $(CPU_CUDA_BUILD)/flags
	$(CXX) $(CPU_CUDA_FLAGS) $(OPS_FLAGS) $(depend) -c $< -o $@

# Each object is built by a make of its own, which has its precision.
ops_objects = for p in fp32 bf16; do \
    $(MAKE) --no-print-directory PRECISION=$$p build/$(1)-$$p/ops_library.o || exit 1; done

ops: ops-cpu $(if $(CUDA),ops-cuda)

ops-cpu:
	@$(call ops_objects,cpu)
	$(CC) -shared $(FLAGS) $(call OPS_IN,cpu) -o build/libllama3_ops.so.new $(filter -ldnnl -lm -pthread,$(LIBS)) \
	    $(DEPS_LINK)
	@mv build/libllama3_ops.so.new build/libllama3_ops.so
	@echo "built build/libllama3_ops.so (fp32 and bf16)"
	@$(if $(HAVE_ONEDNN),,echo "  without oneDNN: matmuls in plain C$(comma) several times slower")

ops-cuda:
	@$(call ops_objects,cuda)
	$(NVCC) -shared -Xcompiler -fopenmp $(call OPS_IN,cuda) -o build/libllama3_ops_cuda.so -lcublasLt -lm
	@echo "built build/libllama3_ops_cuda.so (fp32 and bf16)"

# the CUDA library in the emulator, for dev/test/ops_library.sh; it takes no tensors of PyTorch
ops-cuda-on-cpu:
	@$(call ops_objects,cuda-on-cpu)
	$(CXX) -shared -fopenmp $(call OPS_IN,cuda-on-cpu) -o build/libllama3_ops_cuda_on_cpu.so -lm -pthread
	@echo "built build/libllama3_ops_cuda_on_cpu.so (fp32 and bf16)"

# ---------------------------------------------------------------- PyTorch
# The Python to use: PYTHON=…, otherwise the one that ops-deps made, otherwise python3; it must have PyTorch.
OPS_VENV   := build/python
OPS_PYTHON  = $(firstword $(foreach p,$(or $(PYTHON),$(OPS_VENV)/bin/python python3), \
    $(if $(shell $(p) -c 'import torch; print(1)' 2>/dev/null),$(p))))

# Installs what `make ops` and `make mine` need, and PyTorch in build/python unless python3 has PyTorch. PIP_OPTIONS are
# options of pip install, for example for PyTorch without CUDA, which is much smaller.
ops-deps:
	@$(if $(OPS_WANTED),echo "installing $(OPS_WANTED)"; $(UPDATE); $(INSTALL) $(OPS_WANTED))
	@$(if $(OPS_PYTHON),echo "PyTorch: that of $(OPS_PYTHON)",python3 -m venv $(OPS_VENV) && \
	    $(OPS_VENV)/bin/pip install --quiet $(PIP_OPTIONS) torch numpy && \
	    echo "PyTorch: that of $(OPS_VENV)/bin/python")
OPS_WANTED = $(strip $(if $(HAVE_ONEDNN),,$(word 2,$(PACKAGES))) $(call command_or,$(CXX),g++) \
    $(if $(shell python3 -c 'import ensurepip, venv; print(1)' 2>/dev/null),,python3-venv))

# Runs opcheck and the tests of gradients and errors, and compares every op with its definition.
ops-test: ops-cpu
	@$(if $(OPS_PYTHON),$(OPS_PYTHON) dev/pytorch/test_llama3_ops.py,$(no_pytorch))
no_pytorch = echo "error: no Python with PyTorch was found: make ops-deps installs it, or give PYTHON=" >&2; exit 1

# ---------------------------------------------------------------- kernels of your own, in dev/kernels/mine
# KERNEL=my_rmsnorm: dev/kernels/mine/my_rmsnorm.cu
KERNEL     ?= my_rmsnorm
MINE       := dev/kernels/mine
MINE_FILE  := $(MINE)/$(KERNEL).cu
MINE_BUILD := build/mine
MINE_LIBS  = $(filter -ldnnl -lm -pthread,$(LIBS)) $(DEPS_LINK)
MINE_FLAGS := -Wno-unused-function -Wno-unused-variable

mine-file:
	@test -f $(MINE_FILE) || { echo "error: $(MINE_FILE) does not exist; KERNEL is the name of a file in $(MINE)" \
	    "without .cu" >&2; exit 1; }

$(MINE_BUILD)/$(KERNEL)-$(PRECISION): $(MINE_FILE) $(BUILD)/flags
	@mkdir -p $(@D)
	$(CC) -x c $(FLAGS) $(MINE_FLAGS) $(depend) $(MINE_FILE) -o $@ $(MINE_LIBS)

$(MINE_BUILD)/$(KERNEL)-cuda-on-cpu-$(PRECISION): $(MINE_FILE) $(CPU_CUDA_BUILD)/flags
	@mkdir -p $(@D)
	$(CXX) $(CPU_CUDA_FLAGS) $(MINE_FLAGS) $(depend) $(MINE_FILE) -o $@ -lm -pthread

# Compiled for this machine's GPU alone: compiling for several takes minutes.
$(MINE_BUILD)/$(KERNEL)-cuda-$(PRECISION): $(MINE_FILE) $(CUDA_BUILD)/flags
	@mkdir -p $(@D)
	$(NVCC) $(filter-out -gencode arch=% 2 -t,$(CUDA_FLAGS)) -arch=$(or $(CUDA_ARCH),native) $(depend) \
	    $(MINE_FILE) -o $@ \
	    -lcublasLt -lm 2> $@.ptxas || { cat $@.ptxas >&2; exit 1; }

# The library is ops_library.cu with each implementation replaced for which the file has a function my_OP.
$(MINE_BUILD)/$(KERNEL)-library.cu: $(MINE_FILE)
	@mkdir -p $(@D)
	@{ echo '#include "../../lib/device/device.h"'; echo '#define MINE_LIBRARY'; \
	    echo '#include "../../$(MINE_FILE)"'; \
	    sed -nE 's/^static void my_([a-z0-9_]+)\(OpStream \*on, .*/\1/p' $< | while read -r op; do \
	        if grep -q "^static void cpu_$$op(" lib/ops/cpu/*.h; then \
	            printf '#define cpu_%s my_%s\n#define cuda_%s my_%s\n' $$op $$op $$op $$op; fi; done; \
	    echo '#include "../../dev/pytorch/ops_library.cu"'; } > $@

$(MINE_BUILD)/$(KERNEL)-$(PRECISION).o: $(MINE_BUILD)/$(KERNEL)-library.cu $(MINE_FILE) dev/pytorch/ops_library.cu \
                                       $(BUILD)/flags
	$(CC) -x c $(FLAGS) $(MINE_FLAGS) -fPIC -fvisibility=hidden $(depend) -c $< -o $@

$(MINE_BUILD)/$(KERNEL)-cuda-$(PRECISION).o: $(MINE_BUILD)/$(KERNEL)-library.cu $(MINE_FILE) \
                                            dev/pytorch/ops_library.cu $(CUDA_BUILD)/flags
	$(NVCC) $(filter-out -gencode arch=% 2 -t,$(CUDA_FLAGS)) -arch=$(or $(CUDA_ARCH),native) \
	    -Xcompiler -fPIC,-fvisibility=hidden $(depend) -c $< -o $@ 2> $@.ptxas || { cat $@.ptxas >&2; exit 1; }

$(MINE_BUILD)/$(KERNEL).so: $(foreach p,fp32 bf16,$(MINE_BUILD)/$(KERNEL)-$(p).o)
	$(CC) -shared $(FLAGS) $^ -o $@ $(MINE_LIBS)

$(MINE_BUILD)/$(KERNEL)-cuda.so: $(foreach p,fp32 bf16,$(MINE_BUILD)/$(KERNEL)-cuda-$(p).o)
	$(NVCC) -shared -Xcompiler -fopenmp $^ -o $@ -lcublasLt -lm

# BF16_CPU: without bf16 instructions, bf16 is too slow to be timed here
mine: mine-file
	@KERNEL=$(KERNEL) PRECISIONS="fp32 $(if $(BF16_CPU),bf16)" GPU="$(if $(NVCC),1)" $(MINE)/mine.sh

# Runs on a GPU if there is one, otherwise the C version.
MINE_GPU    = $(if $(NVCC),$(shell nvidia-smi -L 2>/dev/null))
MINE_TARGET = $(MINE_BUILD)/$(KERNEL)$(if $(MINE_GPU),-cuda).so
mine-pytorch: mine-file $(if $(MINE_GPU),ops,ops-cpu)
	@$(if $(OPS_PYTHON),,$(no_pytorch))
	@for p in fp32 bf16; do \
	    $(MAKE) --no-print-directory -s PRECISION=$$p $(MINE_TARGET:.so=)-$$p.o || exit 1; done
	@$(MAKE) --no-print-directory -s $(MINE_TARGET)
	@ops=$$(sed -n 's/^#define \([a-z0-9_]*\) my_.*/\1/p' $(MINE_BUILD)/$(KERNEL)-library.cu); \
	    [ -n "$$ops" ] || { echo "error: $(MINE_FILE) defines no 'static void my_OP(Device *dev, ' for an op OP" \
	        "of lib/ops/ops.h, so there is nothing to check" >&2; exit 1; }; \
	    for op in $(or $(OP),$$ops); do \
	        $(OPS_PYTHON) dev/pytorch/llama3_ops.py check $$op $(MINE_TARGET) || exit 1; done

.PHONY: ops ops-cpu ops-cuda ops-cuda-on-cpu ops-deps ops-test mine mine-file mine-pytorch
