# libraries.mk: which libraries are installed, and the packages of this system that have them. The Makefile includes it.
#
# DEPS=DIR: they are below DIR, in include/ and lib/ or in usr/, as dev/fetch_libraries.sh leaves them: needs no root
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
# Programs look there at run time. With the old tag, the libraries' own libraries are looked for there, too.
DEPS_LINK := $(DEPS_LIB:%=-L%) $(DEPS_LIB:%=-Wl,-rpath,%) \
             $(if $(filter Linux,$(shell uname 2>/dev/null)),-Wl$(comma)--disable-new-dtags)
endif
has_header = $(shell C_INCLUDE_PATH=$(C_INCLUDE_PATH) \
    $(CC) $(2) -include $(1) -E -x c /dev/null >/dev/null 2>&1 && echo 1)
# Fedora's mpicc is not in the PATH
MPICC       := $(firstword $(shell command -v mpicc /usr/lib64/openmpi/bin/mpicc 2>/dev/null))
MPI_CFLAGS  := $(if $(MPICC),$(shell $(MPICC) --showme:compile 2>/dev/null))
MPI_LIBS    := $(if $(MPICC),$(shell $(MPICC) --showme:link 2>/dev/null))
HAVE_MPI    := $(if $(MPICC),$(call has_header,mpi.h,$(MPI_CFLAGS)))
HAVE_ONEDNN := $(call has_header,dnnl.h)
HAVE_CJSON  := $(call has_header,cjson/cJSON.h)
HAVE_PCRE2  := $(call has_header,pcre2.h,-DPCRE2_CODE_UNIT_WIDTH=8)
HAVE_ZLIB   := $(call has_header,zlib.h)

# PACKAGES: the names of MPI, oneDNN, cJSON, PCRE2 and zlib, in this order; EXTRA: what `make deps` also installs
command_or = $(if $(shell command -v $(1) 2>/dev/null),,$(2))
ifneq ($(shell command -v apt-get 2>/dev/null),)
SUDO     := $(if $(filter 0,$(shell id -u)),,sudo)
WITHOUT_ROOT := dev/fetch_libraries.sh DIR && make DEPS=DIR
UPDATE   := $(SUDO) apt-get update -qq
INSTALL  := $(SUDO) apt-get install -y --no-install-recommends
PACKAGES := libopenmpi-dev libdnnl-dev libcjson-dev libpcre2-dev zlib1g-dev
EXTRA    := $(call command_or,mpirun,openmpi-bin) $(call command_or,bible /usr/games/bible,bible-kjv) \
            $(call command_or,$(CXX),g++)
ifneq ($(filter test-hosts,$(MAKECMDGOALS)),)
EXTRA    += $(call command_or,ip,iproute2) $(call command_or,sshd /usr/sbin/sshd,openssh-server) \
            $(call command_or,ssh,openssh-client) $(call command_or,munged /usr/sbin/munged,munge) \
            $(call command_or,slurmctld /usr/sbin/slurmctld,slurmctld slurmd slurm-client slurm-wlm-basic-plugins)
endif
ifneq ($(filter measure,$(MAKECMDGOALS)),)
EXTRA    += $(call command_or,aarch64-linux-gnu-gcc,gcc-aarch64-linux-gnu libc6-dev-arm64-cross) \
            $(call command_or,qemu-aarch64,qemu-user)
endif
else ifneq ($(shell command -v dnf 2>/dev/null),)
INSTALL  := sudo dnf install -y
PACKAGES := openmpi-devel onednn-devel cjson-devel pcre2-devel zlib-devel
EXTRA    := $(call command_or,$(CXX),gcc-c++)
else ifneq ($(shell command -v pacman 2>/dev/null),)
INSTALL  := sudo pacman -S --needed
PACKAGES := openmpi onednn cjson pcre2 zlib
else
INSTALL  := brew install
PACKAGES := open-mpi onednn cjson pcre2 zlib
endif
UPDATE ?= true
WITHOUT_ROOT ?= unpack them below a directory DIR that has include/ and lib/, and make DEPS=DIR
OPTIONAL := $(if $(HAVE_MPI),,$(word 1,$(PACKAGES))) $(if $(HAVE_ONEDNN),,$(word 2,$(PACKAGES)))
NEEDED   := $(strip $(if $(HAVE_CJSON),,$(word 3,$(PACKAGES))) $(if $(HAVE_PCRE2),,$(word 4,$(PACKAGES))) \
                    $(if $(HAVE_ZLIB),,$(word 5,$(PACKAGES))))
MISSING  := $(strip $(OPTIONAL) $(NEEDED))

needed:
	@$(if $(NEEDED),echo "error: missing: $(NEEDED). Install with: $(INSTALL) $(MISSING)" \
	    "  (or make deps; without root: $(WITHOUT_ROOT))" >&2; exit 1)

WANTED := $(strip $(MISSING) $(EXTRA))
define install
echo "installing $(WANTED)"; $(UPDATE); DEBIAN_FRONTEND=noninteractive $(INSTALL) $(WANTED) || { \
    echo "error: could not install these packages: $(WANTED). Without root: $(WITHOUT_ROOT)" >&2; exit 1; }
endef
deps:
	@$(if $(WANTED),$(if $(DEPS),echo "not installed$(comma) because of DEPS=$(DEPS): $(WANTED)",$(install)))
	@$(if $(DEPS),$(if $(NEEDED),echo "error: not below $(DEPS): $(NEEDED)" >&2; exit 1))

.PHONY: needed deps
