# make            the program, in the best precision of this machine (or PRECISION=fp32|bf16)
# make demo       installs what is missing, builds, fetches a text, trains on 2 ranks, samples
# make test       installs what is missing, builds both precisions, runs every test
# make test-all   the same and the long tests     make bench   speed beside the bare products
# make fuzz       a million executions of every fuzz target (RUNS=n)
# make deps       installs what is missing        make clean

CC       ?= cc
ARCH     ?= native
CFLAGS   ?= -O3
RANKS    ?= 2

comma    := ,

# ---------------------------------------------------------------- what is installed
has_header = $(shell $(CC) $(2) -include $(1) -E -x c /dev/null >/dev/null 2>&1 && echo 1)
MPICC       := $(firstword $(shell command -v mpicc /usr/lib64/openmpi/bin/mpicc 2>/dev/null)) # Fedora's is not in the PATH
MPI_CFLAGS  := $(if $(MPICC),$(shell $(MPICC) --showme:compile 2>/dev/null))
HAVE_MPI    := $(if $(MPICC),$(call has_header,mpi.h,$(MPI_CFLAGS)))
HAVE_ONEDNN := $(call has_header,dnnl.h)
HAVE_CJSON  := $(call has_header,cjson/cJSON.h)
HAVE_PCRE2  := $(call has_header,pcre2.h,-DPCRE2_CODE_UNIT_WIDTH=8)

# which package of this system has what; names in the order mpi, oneDNN, cJSON, PCRE2
ifneq ($(shell command -v apt-get 2>/dev/null),)
INSTALL  := $(if $(filter 0,$(shell id -u)),,sudo )apt-get install -y --no-install-recommends
PACKAGES := libopenmpi-dev libdnnl-dev libcjson-dev libpcre2-dev
EXTRA    := $(if $(shell command -v mpirun 2>/dev/null),,openmpi-bin) $(if $(shell command -v bible /usr/games/bible 2>/dev/null),,bible-kjv)
else ifneq ($(shell command -v dnf 2>/dev/null),)
INSTALL  := sudo dnf install -y
PACKAGES := openmpi-devel onednn-devel cjson-devel pcre2-devel
else ifneq ($(shell command -v pacman 2>/dev/null),)
INSTALL  := sudo pacman -S --needed
PACKAGES := openmpi onednn cjson pcre2
else
INSTALL  := brew install
PACKAGES := open-mpi onednn cjson pcre2
endif
MISSING := $(if $(HAVE_MPI),,$(word 1,$(PACKAGES))) $(if $(HAVE_ONEDNN),,$(word 2,$(PACKAGES))) \
           $(if $(HAVE_CJSON),,$(word 3,$(PACKAGES))) $(if $(HAVE_PCRE2),,$(word 4,$(PACKAGES)))
NEEDED  := $(strip $(if $(HAVE_CJSON),,$(word 3,$(PACKAGES))) $(if $(HAVE_PCRE2),,$(word 4,$(PACKAGES))))

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
LIBS  := $(if $(HAVE_MPI),$(shell $(MPICC) --showme:link 2>/dev/null)) $(if $(HAVE_ONEDNN),-ldnnl) -lcjson -lpcre2-8 -lm -pthread
WRAP  := -DWRAP_MALLOC -Wl,--wrap=malloc,--wrap=calloc,--wrap=realloc
HEADERS := $(wildcard *.h dev/test/*.h dev/data/*.h)

train_llama3: $(BUILD)/train_llama3
	@ln -sf $< $@
	@echo "built $< ($(PRECISION))"
	@$(if $(BF16_CPU),,echo "  this processor has no AVX512_BF16: fp32 is the faster precision here")
	@$(if $(HAVE_MPI),,echo "  without MPI: ranks are threads of one process")
	@$(if $(HAVE_ONEDNN),,echo "  without oneDNN: matrix products in plain C$(comma) several times slower")
	@$(if $(strip $(MISSING)),echo "  to have it all: $(INSTALL) $(strip $(MISSING))   (or make deps)")

$(BUILD)/train_llama3: train_llama3.cu $(HEADERS) $(BUILD)/flags | needed
	$(CC) -x c $(FLAGS) $< -o $@ $(LIBS)

$(BUILD)/test_llama3: test_llama3.cu train_llama3.cu $(HEADERS) $(BUILD)/flags | needed
	$(CC) -x c $(FLAGS) -Wno-unused-function $(WRAP) $< -o $@ $(LIBS)

$(BUILD)/bench: dev/kernels/bench.cu train_llama3.cu $(HEADERS) $(BUILD)/flags | needed
	$(CC) -x c $(FLAGS) -Wno-unused-function -I. $< -o $@ $(LIBS)

# rebuilt when the flags or the installed libraries change
$(BUILD)/flags: always
	@mkdir -p $(BUILD)
	@echo '$(CC) $(FLAGS) $(LIBS)' | cmp -s - $@ || echo '$(CC) $(FLAGS) $(LIBS)' > $@

needed:
	@$(if $(NEEDED),echo "error: missing: $(NEEDED). Install with: $(INSTALL) $(strip $(MISSING))   (or make deps)" >&2; exit 1)

programs: $(BUILD)/train_llama3 $(BUILD)/test_llama3

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

test test-all: deps
	@$(MAKE) --no-print-directory PRECISION=fp32 programs
	@$(MAKE) --no-print-directory PRECISION=bf16 programs
	@dev/test/run.sh $(if $(filter test-all,$@),all)

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
	rm -rf build train_llama3

.PHONY: always needed programs deps demo test test-all bench fuzz syntax clean
