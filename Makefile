# make            train_llama3 and the programs around it (programs/) in the best precision of this machine (or
#                 PRECISION=fp32|bf16); if nvcc is installed, or with CUDA=1, train_llama3_cuda too (CUDA= leaves it
#                 out). make plan_llama3: one program alone
# make demo       installs what is missing, builds, fetches a text, trains on 2 ranks, samples
# make finetune   the same with a pretrained model, SmolLM2-135M-Instruct; PYTHON=python3 fetches it, MODEL=DIR has it
# make test       installs what is missing, builds both precisions and runs the tests: 8 minutes on two cores
# make test-all   all tests (ONLY=REGEX: suites whose names match; RESUME=1: those that have not passed at this commit)
# make bench      speed, next to that of the matmuls alone
# make book       the book and the guide as HTML
# make exercise   lists the book's exercises; N=7 prints one; make answer N=7 A='12.3 GB' checks an answer
# make faults     lists twenty bugs to find; make fault N=3 plants one and draws its curve, make fault-answer N=3
#                 explains it (docs/book/fault-lab.md)
# make mine       checks and times a kernel of your own (dev/kernels/mine); make mine-pytorch: next to PyTorch
# make deps       installs what is missing. DEPS=DIR: the libraries are below DIR, and no root is needed
#                 (dev/fetch_libraries.sh DIR fetches them)
# make help-all   this list, and all other targets
## make test-hosts  runs on two to four hosts, which are namespaces of this machine, under mpirun and Slurm; as root. It
##                 installs ssh, munge and Slurm (Debian, Ubuntu)
## make measure    a million executions of each fuzz target, and the unit tests in other builds: hours
## make fuzz       a million executions of each fuzz target (RUNS=n)
## make clean      removes what was built

CC       ?= cc
ARCH     ?= native
CFLAGS   ?= -O3
RANKS    ?= 2
JOBS     ?= $(shell nproc 2>/dev/null || echo 2)

comma    := ,
all:

include dev/libraries.mk

# ---------------------------------------------------------------- how it is built
# On x86, matmuls in bf16 are oneDNN's; on Arm they are the program's own.
BF16_CPU  := $(shell grep -qwE -m1 'avx512_bf16|bf16' /proc/cpuinfo 2>/dev/null && echo 1)
BF16_FAST := $(if $(BF16_CPU),$(or $(HAVE_ONEDNN),$(filter aarch64,$(shell uname -m 2>/dev/null))))
PRECISION ?= $(if $(BF16_FAST),bf16,fp32)
ifeq ($(filter $(PRECISION),fp32 bf16),)
$(error PRECISION=$(PRECISION): this program has no arithmetic in $(PRECISION); expected fp32 or bf16)
endif
BUILD := build/cpu-$(PRECISION)
# -ffp-contract=fast: a fused multiply-add wherever the source has a*b+c, the same in every loop
# -fno-math-errno: sqrtf is one instruction
# GCC 12 for Arm crashes where it vectorizes a maximum over doubles. Loops over floats are written in vectors anyway.
COMPILER      := $(shell $(CC) -dumpmachine 2>/dev/null)-$(shell $(CC) -dumpversion 2>/dev/null)
NO_VECTORIZER := $(if $(filter aarch64%-12,$(COMPILER)),-fno-tree-vectorize)
FLAGS := -std=c11 $(CFLAGS) $(NO_VECTORIZER) -march=$(ARCH) -ffp-contract=fast -fno-math-errno -fopenmp -Wall -Wextra \
         $(if $(CI),-Werror) $(if $(filter bf16,$(PRECISION)),-DPRECISION_BF16) \
         $(if $(HAVE_MPI),-DHAVE_MPI $(MPI_CFLAGS)) $(if $(HAVE_ONEDNN),-DHAVE_ONEDNN)
LIBS  := $(if $(HAVE_MPI),$(MPI_LIBS)) $(if $(HAVE_ONEDNN),-ldnnl) -lcjson -lpcre2-8 -lz -lm -pthread \
         $(DEPS_LINK)
WRAP  := -DWRAP_MALLOC -Wl,--wrap=malloc,--wrap=calloc,--wrap=realloc
# each object says which files it was made of, so that a change of one makes it again
depend = -MMD -MP -MF $@.d -MT $@
-include $(wildcard build/*/*.d)

include dev/cuda.mk
include dev/book.mk
include dev/ops.mk
include dev/course/course.mk

OTHER_PROGRAMS := generate_llama3 eval_llama3 convert_llama3 tokens_llama3 plan_llama3 check_hosts

all:
	@$(MAKE) --no-print-directory $(if $(filter -j%,$(MAKEFLAGS)),,-j$(JOBS)) every-program
every-program: $(if $(CUDA),train_llama3_cuda) train_llama3 $(OTHER_PROGRAMS) # the longest first

train_llama3: $(BUILD)/train_llama3
	@ln -sf $< $@
	@echo "built $< ($(PRECISION))"
	@$(if $(BF16_CPU),,echo "  this processor has no bf16 instructions: fp32 is the faster precision here")
	@$(if $(HAVE_MPI),,echo "  without MPI: ranks are threads of one process")
	@$(if $(HAVE_ONEDNN),,echo "  without oneDNN: matmuls in plain C$(comma) several times slower")
	@$(if $(MISSING),echo "  to install what is missing: $(INSTALL) $(MISSING)   (or make deps)")

$(OTHER_PROGRAMS): %: $(BUILD)/%
	@ln -sf $< $@
	@echo "built $< ($(PRECISION))"

$(BUILD)/train_llama3.o: train_llama3.cu $(BUILD)/flags | needed
	$(CC) -x c $(FLAGS) $(depend) -c $< -o $@

# Without fused multiply-adds a plan's times are the same on every processor, and in the browser (make planner).
$(BUILD)/plan_llama3.o: programs/plan_llama3.cu $(BUILD)/flags | needed
	$(CC) -x c $(FLAGS) -ffp-contract=off -Wno-unused-function $(depend) -c $< -o $@

$(patsubst %,$(BUILD)/%.o,$(filter-out plan_llama3,$(OTHER_PROGRAMS))): \
        $(BUILD)/%.o: programs/%.cu $(BUILD)/flags | needed
	$(CC) -x c $(FLAGS) -Wno-unused-function $(depend) -c $< -o $@

# tokens_llama3 computes nothing with a model, and without libzstd it refuses .zst files by name. private: build/*/flags
# is the same for all programs.
OF_MODELS := -DHAVE_MPI $(MPI_CFLAGS) -DHAVE_ONEDNN $(MPI_LIBS) -ldnnl
$(BUILD)/tokens_llama3.o: private FLAGS := $(filter-out $(OF_MODELS),$(FLAGS)) $(if $(HAVE_ZSTD),-DHAVE_ZSTD)
$(BUILD)/tokens_llama3: private LIBS := $(filter-out $(OF_MODELS),$(LIBS)) -pthread $(if $(HAVE_ZSTD),-lzstd)

$(BUILD)/train_llama3 $(OTHER_PROGRAMS:%=$(BUILD)/%): %: %.o $(BUILD)/commit.o $(BUILD)/pages.o
	$(CC) $(FLAGS) $^ -o $@ $(LIBS)

$(BUILD)/test_llama3: test_llama3.cu $(BUILD)/pages.o $(BUILD)/flags | needed
	$(CC) -x c $(FLAGS) -Wno-unused-function $(WRAP) $(depend) $< -x none $(BUILD)/pages.o -o $@ $(LIBS)

# Tests of the other programs compute little: -O1 compiles them in half the time. In some nothing fills run_hosts, so
# gcc sees that a host's name would be NULL.
TESTS_OF_PROGRAMS := $(OTHER_PROGRAMS:%=test_%)
$(TESTS_OF_PROGRAMS:%=$(BUILD)/%): $(BUILD)/%: dev/test/%.cu $(BUILD)/pages.o $(BUILD)/flags | needed
	$(CC) -x c $(FLAGS) -O1 -Wno-unused-function -Wno-format-overflow $(depend) $< \
	    -x none $(BUILD)/pages.o -o $@ $(LIBS)

$(BUILD)/bench: dev/kernels/bench.cu $(BUILD)/pages.o $(BUILD)/flags | needed
	$(CC) -x c $(FLAGS) -Wno-unused-function -I. $(depend) $< -x none $(BUILD)/pages.o -o $@ $(LIBS)

$(BUILD)/decode: dev/kernels/decode.cu $(BUILD)/pages.o $(BUILD)/flags | needed
	$(CC) -x c $(FLAGS) -Wno-unused-function -I. $(depend) $< -x none $(BUILD)/pages.o -o $@ $(LIBS)

$(BUILD)/logits: dev/pytorch/logits.cu $(BUILD)/pages.o $(BUILD)/flags | needed
	$(CC) -x c $(FLAGS) -Wno-unused-function -I. $(depend) $< -x none $(BUILD)/pages.o -o $@ $(LIBS)

# A program is rebuilt when the flags or the installed libraries change.
$(BUILD)/flags: HOW = $(CC) $(FLAGS) $(LIBS)
$(CUDA_BUILD)/flags: HOW = $(NVCC) $(CUDA_FLAGS) $(CUDA_MPI) $(CUDA_LIBS)
$(CPU_CUDA_BUILD)/flags: HOW = $(CXX) $(CPU_CUDA_FLAGS)
build/%/flags: always
	@mkdir -p $(@D)
	@echo '$(HOW)' | cmp -s - $@ || echo '$(HOW)' > $@

# The commit, for --version. It is an object of its own: after a commit the programs are linked again, not compiled.
# New tables under dev/results change no program: tests that write them must not relink what other tests run.
build/%/commit.o: always
	@mkdir -p $(@D)
	@export GIT_OPTIONAL_LOCKS=0; commit=$$(git describe --always 2>/dev/null) || commit=unknown; \
	    [ $$commit = unknown ] || git diff --quiet HEAD -- . ':!dev/results' || commit=$$commit-dirty; \
	    text="const char *build_commit = \"$$commit\";"; source=$(@:.o=.c); \
	    if ! [ -e $@ ] || ! echo "$$text" | cmp -s - $$source; then \
	        echo "$$text" > $$source && $(CC) -c $$source -o $@; fi

# run.html as text of a C program, with its script in place of the line @PAGE@
build/%/pages.o: dev/pages/run.html dev/pages/page.js
	@mkdir -p $(@D)
	@{ echo 'const char run_html[] ='; \
	    sed -e '/^@PAGE@$$/{' -e 'r dev/pages/page.js' -e 'd' -e '}' dev/pages/run.html | \
	    sed 's/\\/\\\\/g; s/"/\\"/g; s/?/\\?/g; s/^/"/; s/$$/\\n"/'; \
	    echo ';'; } > $(@:.o=.c)
	$(CC) -c $(@:.o=.c) -o $@

programs: $(addprefix $(BUILD)/,test_llama3 train_llama3)
# what `make test` and `make test-all` build in one precision; the longest first
test-bf16-programs: $(addprefix $(CPU_CUDA_BUILD)/,test_llama3_cuda train_llama3_cuda) programs
test-bf16-programs: $(BUILD)/tokens_llama3
test-fp32-programs: programs $(OTHER_PROGRAMS:%=$(BUILD)/%) $(TESTS_OF_PROGRAMS:%=$(BUILD)/%)
test-all-bf16-programs: test-bf16-programs cuda-on-cpu-programs $(OTHER_PROGRAMS:%=$(BUILD)/%) \
                        $(TESTS_OF_PROGRAMS:%=$(BUILD)/%)
test-all-fp32-programs: test-fp32-programs $(BUILD)/check_hosts cuda-on-cpu-programs \
                        build/cuda-on-mpi-fp32/train_llama3_cuda

# ---------------------------------------------------------------- what people type
# Each starts another make after `deps`, which sees what was just installed.
demo: deps
	@$(MAKE) --no-print-directory -j$(JOBS) train_llama3 generate_llama3 eval_llama3
	@RANKS=$(RANKS) dev/demo.sh

finetune: deps
	@$(MAKE) --no-print-directory -j$(JOBS) train_llama3 generate_llama3 eval_llama3
	@RANKS=$(RANKS) dev/finetune.sh

test test-all: deps
	@$(MAKE) --no-print-directory -j$(JOBS) $@-bf16 $@-fp32
	@dev/test/run.sh $(if $(filter test-all,$@),all)

test-fp32 test-bf16 test-all-fp32 test-all-bf16:
	@$(MAKE) --no-print-directory PRECISION=$(lastword $(subst -, ,$@)) $@-programs

test-hosts: deps
	@$(MAKE) --no-print-directory PRECISION=fp32 \
	    $(addprefix build/cpu-fp32/,train_llama3 check_hosts plan_llama3 tokens_llama3 test_llama3) \
	    build/cuda-on-cpu-fp32/train_llama3_cuda build/cuda-on-mpi-fp32/train_llama3_cuda
	@dev/test/hosts.sh

measure: deps
	@dev/test/run.sh measure

bench: deps
	@$(MAKE) --no-print-directory PRECISION=fp32 build/cpu-fp32/bench build/cpu-fp32/train_llama3
	@$(MAKE) --no-print-directory PRECISION=bf16 build/cpu-bf16/bench build/cpu-bf16/train_llama3
	@dev/kernels/bench.sh

fuzz: deps
	@$(MAKE) --no-print-directory -C dev/fuzz $(if $(RUNS),RUNS=$(RUNS))

help:
	@sed -n '/^#/!q; /^##/!s/^# //p' Makefile
help-all: help
	@sed -n 's/^## //p' Makefile dev/*.mk dev/*/*.mk

clean:
	rm -rf build train_llama3 $(OTHER_PROGRAMS) train_llama3_cuda

.PHONY: all every-program always programs help help-all demo finetune test test-all test-hosts measure bench fuzz clean
.PHONY: test-fp32 test-bf16 test-all-fp32 test-all-bf16 test-fp32-programs test-bf16-programs test-all-fp32-programs \
        test-all-bf16-programs
