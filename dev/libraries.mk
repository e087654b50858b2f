# libraries.mk: finds the libraries that are installed, and names this system's packages for the others. The Makefile
# includes it. With DEPS=DIR it looks for them below DIR, in include/ and lib/ or in usr/, where dev/fetch_libraries.sh
# puts them, and installs nothing.
ifneq ($(DEPS),)
below        = $(wildcard $(foreach d,$(1) $(1:%=usr/%),$(addprefix $(abspath $(DEPS))/$(d),/ /*-linux-gnu*)))
DEPS_INCLUDE := $(call below,include)
DEPS_LIB     := $(call below,lib lib64)
ifeq ($(DEPS_INCLUDE),)
$(error DEPS=$(DEPS): expected a directory that has include/ or usr/include/; dev/fetch_libraries.sh DIR makes one)
endif
# Every compiler that is called from here, also by other makefiles and scripts, looks there.
colons = $(subst $() ,:,$(strip $(1)))
export C_INCLUDE_PATH     := $(call colons,$(DEPS_INCLUDE) $(C_INCLUDE_PATH))
export CPLUS_INCLUDE_PATH := $(call colons,$(DEPS_INCLUDE) $(CPLUS_INCLUDE_PATH))
export LIBRARY_PATH       := $(call colons,$(DEPS_LIB) $(LIBRARY_PATH))
export LD_RUN_PATH        := $(call colons,$(DEPS_LIB) $(LD_RUN_PATH))
# Programs look there at run time. --disable-new-dtags writes DT_RPATH, which holds for the libraries that these
# libraries need, too; DT_RUNPATH would not.
DEPS_LINK := $(DEPS_LIB:%=-L%) $(DEPS_LIB:%=-Wl,-rpath,%) \
             $(if $(filter Linux,$(shell uname 2>/dev/null)),-Wl$(comma)--disable-new-dtags)
endif
# the first of these programs that is here. Debian's sh reads only the first name after command -v.
program    = $(firstword $(foreach name,$(1),$(shell command -v $(name) 2>/dev/null)))
has_header = $(shell C_INCLUDE_PATH=$(C_INCLUDE_PATH) \
    $(CC) $(2) -include $(1) -E -x c /dev/null >/dev/null 2>&1 && echo 1)
# Fedora's mpicc is not in the PATH
MPICC       := $(call program,mpicc /usr/lib64/openmpi/bin/mpicc)
MPI_CFLAGS  := $(if $(MPICC),$(shell $(MPICC) --showme:compile 2>/dev/null))
MPI_LIBS    := $(if $(MPICC),$(shell $(MPICC) --showme:link 2>/dev/null))
HAVE_MPI    := $(if $(MPICC),$(call has_header,mpi.h,$(MPI_CFLAGS)))
HAVE_ONEDNN := $(call has_header,dnnl.h)
HAVE_CJSON  := $(call has_header,cjson/cJSON.h)
HAVE_PCRE2  := $(call has_header,pcre2.h,-DPCRE2_CODE_UNIT_WIDTH=8)
HAVE_ZLIB   := $(call has_header,zlib.h)
# only tokens_llama3 uses it
HAVE_ZSTD   := $(call has_header,zstd.h)

# PACKAGES: the names of MPI, oneDNN, cJSON, PCRE2 and zlib, in this order; EXTRA: what `make deps` also installs
command_or = $(if $(call program,$(1)),,$(2))
SUDO       := $(if $(filter 0,$(shell id -u 2>/dev/null)),,sudo)
ifneq ($(call program,apt-get),)
WITHOUT_ROOT := dev/fetch_libraries.sh DIR && make DEPS=DIR
UPDATE   := $(SUDO) apt-get update -qq
INSTALL  := $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends
PACKAGES := libopenmpi-dev libdnnl-dev libcjson-dev libpcre2-dev zlib1g-dev
EXTRA    := $(call command_or,mpirun,openmpi-bin) $(call command_or,bible /usr/games/bible,bible-kjv) \
            $(call command_or,$(CXX),g++) $(call command_or,python3,python3) $(if $(HAVE_ZSTD),,libzstd-dev)
ifneq ($(filter test-hosts,$(MAKECMDGOALS)),)
EXTRA    += $(call command_or,ip,iproute2) $(call command_or,sshd /usr/sbin/sshd,openssh-server) \
            $(call command_or,ssh,openssh-client) $(call command_or,munged /usr/sbin/munged,munge) \
            $(call command_or,slurmctld /usr/sbin/slurmctld,slurmctld slurmd slurm-client slurm-wlm-basic-plugins)
endif
ifneq ($(filter measure,$(MAKECMDGOALS)),)
EXTRA    += $(call command_or,aarch64-linux-gnu-gcc,gcc-aarch64-linux-gnu libc6-dev-arm64-cross) \
            $(call command_or,qemu-aarch64,qemu-user) $(call command_or,musl-gcc,musl-tools)
endif
else ifneq ($(call program,dnf),)
INSTALL  := $(SUDO) dnf install -y
PACKAGES := openmpi-devel onednn-devel cjson-devel pcre2-devel zlib-devel
EXTRA    := $(call command_or,$(CXX),gcc-c++) $(call command_or,python3,python3) $(if $(HAVE_ZSTD),,libzstd-devel)
else ifneq ($(call program,pacman),)
INSTALL  := $(SUDO) pacman -S --needed
PACKAGES := openmpi onednn cjson pcre2 zlib
EXTRA    := $(call command_or,python3,python) $(if $(HAVE_ZSTD),,zstd)
else ifneq ($(call program,brew),)
INSTALL  := brew install
PACKAGES := open-mpi onednn cjson pcre2 zlib
EXTRA    := $(call command_or,python3,python) $(if $(HAVE_ZSTD),,zstd)
WITHOUT_ROOT := if they are installed, name the directory that they are in: make DEPS=$$(brew --prefix)
else
INSTALL  := this system's package manager:
PACKAGES := Open-MPI oneDNN cJSON PCRE2 zlib
endif
UPDATE ?= true
WITHOUT_ROOT ?= unpack them below a directory DIR that has include/ and lib/, and make DEPS=DIR
# why `make deps` installs nothing
LEFT_OUT := $(if $(DEPS),because of DEPS=$(DEPS),$(if $(call program,apt-get dnf pacman brew),,because this system has \
                none of apt-get$(comma) dnf$(comma) pacman and brew))
OPTIONAL := $(if $(HAVE_MPI),,$(word 1,$(PACKAGES))) $(if $(HAVE_ONEDNN),,$(word 2,$(PACKAGES)))
NEEDED   := $(strip $(if $(HAVE_CJSON),,$(word 3,$(PACKAGES))) $(if $(HAVE_PCRE2),,$(word 4,$(PACKAGES))) \
                    $(if $(HAVE_ZLIB),,$(word 5,$(PACKAGES))))
MISSING  := $(strip $(OPTIONAL) $(NEEDED))

needed:
	@$(if $(NEEDED),echo "error: missing: $(NEEDED). Install with: $(INSTALL) $(MISSING)" \
	    "  (or make deps; without root: $(WITHOUT_ROOT))" >&2; exit 1)

WANTED := $(strip $(MISSING) $(EXTRA))
define install
echo "installing $(WANTED)"; $(UPDATE); $(INSTALL) $(WANTED) || { \
    echo "error: could not install these packages: $(WANTED). Without root: $(WITHOUT_ROOT)" >&2; exit 1; }
endef
deps:
	@$(if $(WANTED),$(if $(LEFT_OUT),echo "not installed$(comma) $(LEFT_OUT): $(WANTED)",$(install)))
	@$(if $(LEFT_OUT),$(if $(NEEDED),echo "error: missing: $(NEEDED). Without root: $(WITHOUT_ROOT)" >&2; exit 1))

.PHONY: needed deps
