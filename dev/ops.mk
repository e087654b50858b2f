# ops.mk: the ops of lib/ops.h as a shared library for PyTorch (dev/pytorch/llama3_ops.py). The Makefile includes it.
# build/libllama3_ops.so has both precisions; build/libllama3_ops_cuda.so, if nvcc is installed, has them for GPUs.
OPS_FLAGS := -fPIC -fvisibility=hidden -Wno-unused-function
OPS_IN     = $(foreach p,fp32 bf16,build/$(1)-$(p)/ops_library.o)
OPS_SOURCES := dev/pytorch/ops_library.cu $(filter lib/%,$(HEADERS))

$(BUILD)/ops_library.o: $(OPS_SOURCES) $(BUILD)/flags
	$(CC) -x c $(FLAGS) $(OPS_FLAGS) -c $< -o $@

$(CUDA_BUILD)/ops_library.o: $(OPS_SOURCES) $(CUDA_BUILD)/flags
	@$(if $(NVCC),,echo "$(NO_NVCC)" >&2; exit 1)
	$(NVCC) $(CUDA_FLAGS) -Xcompiler -fPIC,-fvisibility=hidden -c $< -o $@ 2> $(@:.o=.ptxas) || \
	    { cat $(@:.o=.ptxas) >&2; exit 1; }

$(CPU_CUDA_BUILD)/ops_library.o: $(OPS_SOURCES) $(CUDA_ON_CPU) $(CPU_CUDA_BUILD)/flags
	$(CXX) $(CPU_CUDA_FLAGS) $(OPS_FLAGS) -c $< -o $@

# Each object is built by a make of its own, which has its precision.
ops_objects = for p in fp32 bf16; do \
    $(MAKE) --no-print-directory PRECISION=$$p build/$(1)-$$p/ops_library.o || exit 1; done

ops: $(if $(CUDA),ops-cuda)
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

# the CUDA kernels for tensors of the CPU: llama3_ops.py loads them with LLAMA3_OPS=build/libllama3_ops_cuda_on_cpu.so
ops-cuda-on-cpu:
	@$(call ops_objects,cuda-on-cpu)
	$(CXX) -shared -fopenmp $(call OPS_IN,cuda-on-cpu) -o build/libllama3_ops_cuda_on_cpu.so -lm -pthread
	@echo "built build/libllama3_ops_cuda_on_cpu.so (fp32 and bf16)"

.PHONY: ops ops-cuda ops-cuda-on-cpu
