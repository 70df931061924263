/* Has memset, memcpy and memmove of its own, as programs built with sanitizers have: they count in memory that may be
   out. Whoever calls them for the engine waits for itself. And mmap, madvise and others by libc's `syscall`, as profilers of
   heaps have: a wrapper that calls them for its own comes back to itself, for ever. And `dlsym`, as overlays of games have:
   what it finds behind itself is the agent's. And looks from a handler for who called `syscall`, as profilers do. cc -O1 -fno-builtin -rdynamic */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <execinfo.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static const size_t COUNTS = 32ul << 20;
static unsigned char *counts;

static void count(void *at, size_t len) {
    if (counts && len) counts[((unsigned long)at * 2654435761u >> 7) % COUNTS]++;
}

void *memset(void *to, int value, size_t len) {
    count(to, len);
    for (volatile char *at = to; len--;) *at++ = value;
    return to;
}

void *memmove(void *to, const void *from, size_t len) {
    volatile char *at = to;
    const char *source = from;
    count(to, len);
    if (at < source)
        while (len--) *at++ = *source++;
    else
        while (len--) at[len] = source[len];
    return to;
}

void *mmap(void *at, size_t len, int access, int flags, int fd, off_t offset) {
    return (void *)syscall(SYS_mmap, at, len, access, flags, fd, offset);
}
int madvise(void *at, size_t len, int advice) { return syscall(SYS_madvise, at, len, advice); }
void *mremap(void *at, size_t len, size_t to, int flags, ...) { return (void *)syscall(SYS_mremap, at, len, to, flags, 0); }
int mlockall(int flags) { return syscall(SYS_mlockall, flags); }
void *shmat(int id, const void *at, int flags) { return (void *)syscall(SYS_shmat, id, at, flags); }
ssize_t vmsplice(int fd, const struct iovec *parts, size_t count, unsigned flags) {
    return syscall(SYS_vmsplice, fd, parts, count, flags);
}
int setsockopt(int fd, int level, int name, const void *value, socklen_t len) {
    return syscall(SYS_setsockopt, fd, level, name, value, len);
}
int prlimit(pid_t pid, enum __rlimit_resource what, const struct rlimit *new, struct rlimit *old) {
    return syscall(SYS_prlimit64, pid, what, new, old);
}

void *dlsym(void *restrict handle, const char *restrict name) {
    void *(*libc)(void *, const char *) = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
    if (!libc) libc = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
    void *found = libc ? libc(handle, name) : 0;
    if (counts) counts[0]++;
    return found;
}

static int finds_main;

static void on_signal(int signal) {
    void *frames[32];
    Dl_info about;
    for (int n = backtrace(frames, 32); n--;)
        finds_main |= dladdr(frames[n], &about) && about.dli_sname && !strcmp(about.dli_sname, "main");
}

/* One call of each; its result, so that runs can be compared. */
static int calls(void) {
    int one = 1, ends[2], id = shmget(IPC_PRIVATE, 4096, IPC_CREAT | 0600);
    struct rlimit most;
    char *page = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct iovec part = {page, 100};
    if (pipe(ends)) return -1;
    int done = madvise(page, 4096, MADV_NORMAL) == 0;
    done += (page = mremap(page, 4096, 8192, MREMAP_MAYMOVE)) != MAP_FAILED;
    part.iov_base = page;
    done += prlimit(0, RLIMIT_CORE, 0, &most) == 0;
    done += setsockopt(socket(AF_UNIX, SOCK_STREAM, 0), SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) == 0;
    done += vmsplice(ends[1], &part, 1, 0) == 100;
    done += mlockall(MCL_FUTURE | 1 << 20) != 0;
    done += shmat(id, 0, 0) != (void *)-1;
    shmctl(id, IPC_RMID, 0);
    return done;
}

void *memcpy(void *to, const void *from, size_t len) { return memmove(to, from, len); }

int main(void) {
    size_t len = 64ul << 20;
    unsigned char *data = malloc(len);
    unsigned long sum = 0;
    counts = mmap(0, COUNTS, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (size_t at = 0; at < len; at += 64) data[at] = at >> 6;
    for (size_t at = 0; at < COUNTS; at += 4096) counts[at] = 0;
    for (int round = 0; round < 3; round++)
        for (size_t at = 0; at < len; at += 64) sum = sum * 31 + data[at];
    signal(SIGUSR1, on_signal);
    syscall(SYS_tgkill, getpid(), gettid(), SIGUSR1);
    printf("%lu %d %d\n", sum, calls(), finds_main);
    return 0;
}
