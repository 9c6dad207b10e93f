// Threads that call `vfork` and threads that call `fork` at the same time. A child of `fork` must not hold the
// write end of the pipe for which a parent in `vfork` waits. With an argument, the program has a socket.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/sched.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { DESCRIPTORS = 1024, SECONDS = 2 };

static atomic_int ends, forks, vforks, held, handled;

// How many write ends of pipes the program has inherited.
static int inherited;

// Returns how many write ends of pipes this process has.
static int write_ends(void)
{
    int count = 0;
    for (int fd = 0; fd < DESCRIPTORS; fd++) {
        struct stat status;
        if (fstat(fd, &status) == 0 && S_ISFIFO(status.st_mode))
            count += (fcntl(fd, F_GETFL) & O_ACCMODE) == O_WRONLY;
    }
    return count;
}

static int status_of(pid_t child)
{
    int status;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR)
        ;
    return WEXITSTATUS(status);
}

// Ways to fork.
enum { BY_LIBC, BY_CLONE, BY_CLONE3, BY_FORK };

static pid_t fork_by(int way)
{
    struct clone_args args = {.exit_signal = SIGCHLD};
    switch (way) {
    case BY_CLONE:
        return syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
    case BY_CLONE3:
        return syscall(SYS_clone3, &args, sizeof args);
#ifdef SYS_fork
    case BY_FORK:
        return syscall(SYS_fork);
#endif
    default:
        return fork();
    }
}

static void *fork_children(void *ways)
{
    for (int i = 0; !ends; i++) {
        pid_t child = fork_by(((int *)ways)[i % 2]);
        if (child == 0)
            _exit(write_ends() - inherited);
        held += status_of(child);
        forks++;
    }
    return NULL;
}

static void *vfork_children(void *unused)
{
    while (!ends) {
        pid_t child = vfork();
        if (child == 0)
            _exit(7);
        if (status_of(child) != 7)
            printf("wrong child\n");
        vforks++;
    }
    return unused;
}

// A handler that forks in the middle of `vfork`. Its child must not hold the pipe of that `vfork` either.
static void fork_in_handler(int signal)
{
    int before = errno;
    (void)signal;
    pid_t child = vfork();
    if (child == 0)
        _exit(0);
    status_of(child);
    child = fork();
    if (child == 0)
        _exit(write_ends() - inherited);
    held += status_of(child);
    handled++;
    errno = before;
}

// Returns whether `vfork` returns when its child ends, although a child of that child goes on.
static int waits_for_its_child_alone(void)
{
    int ends_of_pipe[2];
    struct timespec before, after;
    if (pipe2(ends_of_pipe, O_CLOEXEC) != 0)
        return 0;
    clock_gettime(CLOCK_MONOTONIC, &before);
    pid_t child = vfork();
    if (child == 0) {
        if (syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0) == 0) {
            char byte;
            alarm(10);
            close(ends_of_pipe[1]);
            // Ends when the first process closes the pipe.
            _exit(read(ends_of_pipe[0], &byte, 1));
        }
        _exit(0);
    }
    clock_gettime(CLOCK_MONOTONIC, &after);
    close(ends_of_pipe[0]);
    close(ends_of_pipe[1]);
    return status_of(child) == 0 && after.tv_sec - before.tv_sec < 5;
}

int main(int argc, char **argv)
{
    (void)argv;
    if (argc > 1 && socket(AF_INET, SOCK_STREAM, 0) < 0)
        return 1;
    printf("waits for its child alone: %d\n", waits_for_its_child_alone());
    fflush(stdout);
    inherited = write_ends();
    pthread_t threads[4];
    int ways[] = {BY_LIBC, BY_FORK, BY_CLONE, BY_CLONE3};
    pthread_create(&threads[0], NULL, fork_children, &ways[0]);
    pthread_create(&threads[1], NULL, fork_children, &ways[2]);
    pthread_create(&threads[2], NULL, vfork_children, NULL);
    pthread_create(&threads[3], NULL, vfork_children, NULL);
    struct timespec time = {.tv_sec = SECONDS};
    nanosleep(&time, NULL);
    ends = 1;
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    printf("held: %d\n", held);
    fprintf(stderr, "%d forks, %d vforks, %d held\n", forks, vforks, held);

    // The handler runs anywhere in `vfork`.
    ends = held = 0;
    struct sigaction action = {.sa_handler = fork_in_handler, .sa_flags = SA_RESTART};
    sigaction(SIGALRM, &action, NULL);
    struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGALRM};
    timer_t timer;
    timer_create(CLOCK_MONOTONIC, &event, &timer);
    // `fork` is not reentrant, so the handler interrupts only the thread that calls `vfork`.
    sigset_t alarms;
    sigemptyset(&alarms);
    sigaddset(&alarms, SIGALRM);
    pthread_sigmask(SIG_BLOCK, &alarms, NULL);
    pthread_create(&threads[0], NULL, fork_children, &ways[0]);
    pthread_sigmask(SIG_UNBLOCK, &alarms, NULL);
    struct timespec begin, now;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (long i = 1;; i++) {
        struct itimerspec soon = {.it_value.tv_nsec = 1000 * (1 + i * 7919 % 400)};
        timer_settime(timer, 0, &soon, NULL);
        pid_t child = vfork();
        if (child == 0)
            _exit(7);
        if (status_of(child) != 7)
            printf("wrong child\n");
        clock_gettime(CLOCK_MONOTONIC, &now);
        if (now.tv_sec - begin.tv_sec >= SECONDS)
            break;
    }
    timer_delete(timer);
    ends = 1;
    pthread_join(threads[0], NULL);
    printf("held with handlers: %d\n", held);
    fprintf(stderr, "%d times in handlers\n", handled);
    return 0;
}
