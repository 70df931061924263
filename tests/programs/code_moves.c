/* Moves code of no file by mremap where a lock of the engine's would be fatal: on stacks that are out while others fork,
   and in a process that shares the memory and is killed amid it. cc -O1 -pthread */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

enum { PAGE = 4096, AREAS = 1500, EACH = 150, THREADS = 12, FORKS = 30, KILLS = 15 };
static const size_t DATA = 24000;
static char *code, *data;
static volatile int stop;
static __thread ucontext_t thread, coroutine;

static void body(unsigned seed) {
    while (!stop) {
        size_t area = rand_r(&seed) % (AREAS - EACH + 1);
        mremap(code + area * 2 * PAGE, EACH * 2 * PAGE, EACH * 2 * PAGE, 0);
        for (int i = 0; i < 2; i++) data[rand_r(&seed) % DATA * PAGE]++;
    }
}

static void *worker(void *seed) {
    size_t len = 16 * PAGE;
    getcontext(&coroutine);
    coroutine.uc_stack.ss_sp = mmap(0, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    coroutine.uc_stack.ss_size = len;
    coroutine.uc_link = &thread;
    makecontext(&coroutine, (void (*)(void))body, 1, (unsigned)(long)seed);
    swapcontext(&thread, &coroutine);
    return 0;
}

static int guest(void *unused) {
    for (;;) mremap(code, AREAS * 2 * PAGE, AREAS * 2 * PAGE, 0);
}

static void fork_once(void) {
    int status;
    pid_t child = fork();
    if (child == 0) _exit(7);
    if (child < 0 || waitpid(child, &status, 0) != child || status != 7 << 8) {
        puts("a child that is wrong");
        exit(1);
    }
}

int main(void) {
    pthread_t threads[THREADS];
    unsigned seed = 1;
    char *stack = malloc(64 << 10);
    code = mmap(0, AREAS * 2 * PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (size_t area = 0; area < AREAS; area++) mprotect(code + area * 2 * PAGE, PAGE, PROT_READ | PROT_EXEC);
    data = mmap(0, DATA * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (size_t page = 0; page < DATA; page++) data[page * PAGE] = 1;
    for (long i = 0; i < THREADS; i++) pthread_create(&threads[i], 0, worker, (void *)(i + 1));
    for (int i = 0; i < FORKS; i++, usleep(20000)) fork_once();
    stop = 1;
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], 0);
    for (int i = 0; i < KILLS; i++) {
        pid_t other = clone(guest, stack + (64 << 10), CLONE_VM | SIGCHLD, 0);
        usleep(rand_r(&seed) % 5000);
        kill(other, SIGKILL);
        waitpid(other, 0, 0);
        fork_once();
    }
    puts("done");
    return 0;
}
