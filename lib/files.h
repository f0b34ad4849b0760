// Files and folders for those who must not end the process: what fails comes back as an errno, or as one line in `why`
// for a caller who may know another file.
#ifndef FILES_H
#define FILES_H

#include "check.h"

#include <fcntl.h>
#include <unistd.h>

enum { WHY_BYTES = 512 }; // of a line that says why a file was refused or could not be written

// why (WHY_BYTES) = the printed line, cut where it does not fit. Returns 1.
__attribute__((format(printf, 2, 3))) static inline int refuse(char* why, const char* format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(why, WHY_BYTES, format, args);
    va_end(args);
    return 1;
}

// errno of what has just failed; EIO where the library set none.
static inline int errno_or_eio(void) { return errno != 0 ? errno : EIO; }

// For qsort: ascending.
static inline int compare_ints(const void* a, const void* b) {
    int x = *(const int*)a, y = *(const int*)b;
    return (x > y) - (x < y);
}

// Bring a folder's entries to the disk. 0 or errno; a file system that cannot sync folders has done its best.
static inline int sync_folder(const char* path) {
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) { return errno; }
    int error = fsync(fd) == 0 || errno == EINVAL ? 0 : errno;
    close(fd);
    return error;
}

// Make the folder `path` with its parents, each synced into the one it is in. 0 or errno; ENOTDIR: a file is in the way.
static inline int make_folders(const char* path) {
    size_t length = strlen(path), parent_length = 1;
    char *part = (char*)malloc_or_die(length + 1), *parent = (char*)malloc_or_die(length + 2);
    strcpy(parent, path[0] == '/' ? "/" : ".");
    int error = 0;
    for (size_t i = 1; i <= length && error == 0; i++) {
        if (path[i] != '/' && path[i] != 0) { continue; }
        memcpy(part, path, i);
        part[i] = 0;
        struct stat st;
        if (stat(part, &st) == 0) {
            error = S_ISDIR(st.st_mode) ? 0 : ENOTDIR;
        } else if (mkdir(part, 0777) == 0) {
            error = sync_folder(parent);
        } else if (errno != EEXIST) { // EEXIST: another rank was faster
            error = errno;
        }
        parent_length = i;
        memcpy(parent, part, parent_length + 1);
    }
    free(part);
    free(parent);
    return error;
}

#endif
