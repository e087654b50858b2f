/* input.h: opening files that the user names. A named pipe, a device or a socket is refused by name, because reading it
 * may never end. A stream that is open already, as in `<(command)` or /dev/stdin, is read to its end.
 */
#ifndef INPUT_H
#define INPUT_H
#include "../device/base.h" // defines: user_error, file_kind; includes the headers of POSIX

/* Refuses a path if reading it may never end. `expected` says what it should be. */
static inline void refuse_endless(const char *path, const struct stat *info, const char *expected) {
    struct stat null;
    int is_stdin = !strcmp(path, "/dev/stdin"), is_terminal = is_stdin && isatty(STDIN_FILENO);
    int is_open_stream = is_stdin || !strncmp(path, "/dev/fd/", 8) || !strncmp(path, "/proc/self/fd/", 14);
    mode_t mode = info->st_mode;
    int is_null = S_ISCHR(mode) && !stat("/dev/null", &null) && null.st_rdev == info->st_rdev;
    int is_endless = S_ISSOCK(mode) || S_ISBLK(mode) || (S_ISCHR(mode) && !is_null && !is_terminal) ||
                     (S_ISFIFO(mode) && !is_open_stream);
    if (is_endless)
        user_error("%s is %s, expected %s: write the contents to a file first", path, file_kind(mode), expected);
}

/* Opens a file, or a stream that is open already, to be read. NULL: errno says why it cannot be opened. */
static inline FILE *input_open(const char *path, const char *expected) {
    struct stat info;
    if (!stat(path, &info)) refuse_endless(path, &info, expected); // a socket cannot be opened at all
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);        // a named pipe would wait for someone who writes
    if (fd < 0) return NULL;
    if (!fstat(fd, &info)) refuse_endless(path, &info, expected); // it may have been replaced since
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK);
    refuse_lfs_pointer(fd, path);
    return fdopen(fd, "rb");
}

#endif
