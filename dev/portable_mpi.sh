#!/usr/bin/env bash
# portable_mpi.sh DIR: copies this machine's Open MPI into DIR, from where it starts ranks on a host without MPI: the
# launcher, its libraries, and the components that ranks of one host need (9.5 MB of Debian's 4.1.4). dev/gpu_check.sh
# runs it with the variables OPAL_PREFIX, PATH and LD_LIBRARY_PATH, which say where DIR is.
set -euo pipefail
to=${1:?portable_mpi.sh: expected a directory}
where() { ompi_info --parsable --path "$1" | cut -d: -f3; }
command -v ompi_info >/dev/null || {
    echo "error: no ompi_info: install Open MPI (apt install openmpi-bin)" >&2
    exit 1
}
components=$(where pkglibdir) prefix=$(where prefix)
rm -rf "$to"
mkdir -p "$to/bin" "$to/lib" "$to/etc" "$to/share" "$to${components#"$prefix"}"
cp "$(readlink -f "$(command -v mpirun)")" "$to/bin/mpirun"
ln -s mpirun "$to/bin/orterun"
cp -r "$(where pkgdatadir)" "$to/share/openmpi"
cp -rL "$(where sysconfdir)" "$to/etc/openmpi"
for file in "$components"/*.so; do
    case ${file##*/} in
        *ofi* | *openib* | *usnic* | *ucx* | mca_mtl_* | mca_common_* | *slurm* | *flux* | *romio* | *gridengine*) ;;
        mca_coll_sm.so | mca_coll_adapt.so | *monitoring* | *reachable_netlink*) ;;
        *) cp "$file" "$to${components#"$prefix"}/" ;;
    esac
done
# the libraries that these load, but not those of the C runtime
for file in "$(command -v ompi_info)" "$to/bin/mpirun" "$to${components#"$prefix"}"/*.so; do ldd "$file"; done |
    awk '$3 ~ "^/" && $1 ~ /^lib(mpi|open-rte|open-pal|pmix|hwloc|event|munge|udev)/ { print $3 }' | sort -u |
    xargs -I{} cp -L {} "$to/lib/"
echo "$to: $(du -sh "$to" | cut -f1) of Open MPI $(ompi_info --version | sed -nE 's/^Open MPI v//p')"
