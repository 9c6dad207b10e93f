// Signal handlers that run during socket calls. The output must be the same on a stack and on the kernel.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <setjmp.h>
#include <signal.h>
#include <spawn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

static struct sockaddr_in at;
static int listener;

struct pair { int ours, theirs; };

static void listens(void)
{
    listener = socket(AF_INET, SOCK_STREAM, 0);
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = inet_addr("127.0.0.1");
    bind(listener, (void *)&at, sizeof at);
    socklen_t n = sizeof at;
    getsockname(listener, (void *)&at, &n);
    listen(listener, 50);
}

static struct pair pair(void)
{
    struct pair new;
    new.ours = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(new.ours, (void *)&at, sizeof at)) perror("connect"), exit(1);
    new.theirs = accept(listener, 0, 0);
    return new;
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static void every(int us)
{
    struct itimerval in = {{.tv_usec = us}, {.tv_usec = us}};
    setitimer(ITIMER_REAL, &in, 0);
}

static void handle(int number, void (*handler)(int, siginfo_t *, void *), int flags)
{
    struct sigaction action = {.sa_sigaction = handler, .sa_flags = flags | SA_SIGINFO};
    if (sigaction(number, &action, 0)) perror("sigaction"), exit(1);
}

static void block(int how, int number)
{
    sigset_t one;
    sigemptyset(&one), sigaddset(&one, number);
    pthread_sigmask(how, &one, 0);
}

static unsigned below(unsigned bound)
{
    static _Thread_local unsigned state = 12345;
    state = state * 1103515245 + 12345;
    return (state >> 16) % bound;
}

// Makes a random call on a connection whose data is not checked.
static void call(struct pair on, int set)
{
    static char bytes[4096];
    struct iovec many[40];
    struct epoll_event event;
    struct pollfd ready[] = {{on.ours, POLLIN | POLLOUT}, {on.theirs, POLLIN}, {0}};
    struct timeval soon = {0, below(200)};
    fd_set in;
    socklen_t room = sizeof bytes;
    switch (below(11)) {
    case 0: case 1: send(on.ours, bytes, 1 + below(sizeof bytes), MSG_DONTWAIT); break;
    case 2: case 3: recv(on.theirs, bytes, sizeof bytes, MSG_DONTWAIT); break;
    case 4: epoll_wait(set, &event, 1, below(2)); break;
    case 5: poll(ready, 2, below(2)); break;
    case 6: FD_ZERO(&in); FD_SET(on.ours, &in); FD_SET(on.theirs, &in); select(on.ours + on.theirs + 1, &in, 0, 0, &soon); break;
    case 7:
        for (int i = 0; i < 40; i++) many[i] = (struct iovec){bytes + i * 10, 10};
        recv(on.theirs, bytes, 1, MSG_DONTWAIT | MSG_PEEK) == 1 ? readv(on.theirs, many, 40) : 0;
        break;
    case 8: setsockopt(on.ours, SOL_SOCKET, SO_KEEPALIVE, &(int){below(2)}, 4); break;
    case 9: getsockopt(on.ours, IPPROTO_TCP, TCP_INFO, bytes, &room), getsockname(on.ours, (void *)bytes, &room); break;
    case 10: event.events = EPOLLIN | EPOLLOUT * below(2), epoll_ctl(set, EPOLL_CTL_MOD, on.theirs, &event); break;
    }
}

static int watching(struct pair these)
{
    int set = epoll_create1(0);
    struct epoll_event event = {EPOLLIN, {.fd = 1}};
    epoll_ctl(set, EPOLL_CTL_ADD, these.theirs, &event);
    return set;
}

// A thread that checks the data of its own connection meanwhile.
static atomic_int over;
static atomic_long carried, wrong;

static void *carry(void *unused)
{
    struct pair own = pair();
    unsigned char out[1000], in[1000];
    for (long round = 0; !over; round++) {
        memset(out, round, sizeof out);
        if (send(own.ours, out, sizeof out, 0) != sizeof out) wrong++;
        if (recv(own.theirs, in, sizeof in, MSG_WAITALL) != sizeof in || memcmp(in, out, sizeof in)) wrong++;
        carried++;
    }
    close(own.ours), close(own.theirs);
    return unused;
}

static pthread_t beside(void *(*what)(void *), void *argument, int without)
{
    pthread_t thread;
    block(SIG_BLOCK, without), pthread_create(&thread, 0, what, argument), block(SIG_UNBLOCK, without);
    return thread;
}

// Handlers that leave the interrupted call by siglongjmp.
static sigjmp_buf out;
static volatile sig_atomic_t armed;
static volatile long jumps;

static void jump(int number, siginfo_t *info, void *context)
{
    if (!armed) return;
    armed = 0;
    jumps++;
    siglongjmp(out, 1);
}

static void test_jumps(void)
{
    struct pair these = pair();
    int set = watching(these);
    handle(SIGALRM, jump, SA_RESTART);
    pthread_t thread = beside(carry, 0, SIGALRM);
    double end = now() + 2;
    every(50);
    sigsetjmp(out, 1);
    while (now() < end) {
        armed = 1;
        call(these, set);
        armed = 0;
    }
    every(0);
    over = 1;
    pthread_join(thread, 0);
    printf("jumps: %s, carried: %s, wrong: %ld\n", jumps > 500 ? "many" : "few", carried > 20 ? "much" : "little", wrong);
    struct pair later = pair();
    char c = 0;
    printf("then: %zd", send(later.ours, "x", 1, 0));
    printf(" %zd", recv(later.theirs, &c, 1, 0));
    printf(" %c\n", c);
}

// Handlers that call socket functions.
static struct pair of_handler;
static volatile long ran, refused;
static volatile int last_error;

static void uses(int number, siginfo_t *info, void *context)
{
    int error = errno;
    long word = ++ran, back = 0;
    if (send(of_handler.ours, &word, sizeof word, 0) != sizeof word) refused++, last_error = errno;
    else if (recv(of_handler.theirs, &back, sizeof back, MSG_WAITALL) != sizeof back) refused++, last_error = errno;
    else if (back != word) refused++;
    if (ran % 16 == 0) {
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        if (fd < 0 || close(fd)) refused++, last_error = errno;
        // A closed descriptor is invalid immediately.
        if (send(fd, "x", 1, 0) != -1 || errno != EBADF) refused++;
    }
    errno = error;
}

static void test_uses(void)
{
    struct pair these = pair();
    int set = watching(these);
    of_handler = pair();
    handle(SIGALRM, uses, SA_RESTART);
    pthread_t thread = beside(carry, 0, SIGALRM);
    double end = now() + 2;
    every(150);
    while (now() < end) call(these, set);
    every(0);
    over = 1;
    pthread_join(thread, 0);
    printf("ran: %s, refused: %ld (%d), carried: %s, wrong: %ld\n", ran > 300 ? "often" : "seldom", refused, last_error,
           carried > 20 ? "much" : "little", wrong);
}

// Queued realtime signals.
#define QUEUED 20000
static volatile long expected, disordered, strange;
static pid_t sender;

static void counts(int number, siginfo_t *info, void *context)
{
    if (info->si_value.sival_int != expected) disordered++;
    if (info->si_code != SI_QUEUE || info->si_pid != sender || info->si_signo != SIGRTMIN + 3) strange++;
    expected = info->si_value.sival_int + 1;
    ran++;
}

static void test_queue(void)
{
    struct pair these = pair();
    int set = watching(these);
    handle(SIGRTMIN + 3, counts, SA_RESTART);
    pid_t parent = getpid();
    block(SIG_BLOCK, SIGRTMIN + 3);
    sender = fork();
    if (!sender) {
        for (int i = 0; i < QUEUED; i++) {
            while (sigqueue(parent, SIGRTMIN + 3, (union sigval){.sival_int = i}) && errno == EAGAIN) usleep(100);
            if (i % 8 == 0) usleep(20);
        }
        _exit(0);
    }
    block(SIG_UNBLOCK, SIGRTMIN + 3);
    while (waitpid(sender, 0, WNOHANG) == 0 || expected < QUEUED) call(these, set);
    printf("ran: %ld, disordered: %ld, strange: %ld\n", ran, disordered, strange);
}

// Signals sent to single threads, handled on alternate signal stacks, and handlers with SA_RESETHAND.
#define THREADS 3
#define ROUNDS 1500
static _Thread_local struct own { pthread_t thread; char *stack; atomic_long ran, once; int begun; } *own;
static struct own owns[THREADS];
static atomic_long strays, off_stack;
#define OWN_STACK (256 << 10)

static void directed(int number, siginfo_t *info, void *context)
{
    char here;
    if (!own || !pthread_equal(own->thread, pthread_self())) { strays++; return; }
    if (&here < own->stack || &here >= own->stack + OWN_STACK) off_stack++;
    // The signal mask in the context is that of the interrupted thread, which does not block this signal.
    if (sigismember(&((ucontext_t *)context)->uc_sigmask, number)) strays++;
    if (info->si_code != SI_TKILL || info->si_pid != getpid()) strays++;
    own->ran++;
}

static void *in_calls(void *mine)
{
    struct pair these = pair();
    int set = watching(these);
    own = mine;
    stack_t stack = {.ss_sp = own->stack, .ss_size = OWN_STACK};
    sigaltstack(&stack, 0);
    own->thread = pthread_self();
    ((volatile struct own *)own)->begun = 1;
    while (!over) call(these, set);
    return 0;
}

static void test_threads(void)
{
    handle(SIGUSR1, directed, SA_RESTART | SA_ONSTACK);
    for (int i = 0; i < THREADS; i++) {
        owns[i].stack = malloc(OWN_STACK);
        pthread_t thread;
        pthread_create(&thread, 0, in_calls, &owns[i]);
        while (!((volatile struct own *)owns)[i].begun) usleep(100);
    }
    for (long round = 1; round <= ROUNDS; round++)
        for (int i = 0; i < THREADS; i++) {
            pthread_kill(owns[i].thread, SIGUSR1);
            for (double until = now() + 10; owns[i].ran < round && now() < until;) sched_yield();
            if (owns[i].ran != round) printf("thread %d: %ld of %ld\n", i, (long)owns[i].ran, round), exit(1);
        }
    over = 1;
    for (int i = 0; i < THREADS; i++) pthread_join(owns[i].thread, 0);
    printf("strays: %ld, off their stack: %ld\n", strays, off_stack);
}

static void once(int number, siginfo_t *info, void *context)
{
    struct sigaction in_force;
    sigaction(number, 0, &in_force);
    if (in_force.sa_handler != SIG_DFL || !(in_force.sa_flags & SA_RESETHAND)) strange++;
    ran++;
}

static pthread_t main_thread;
static atomic_long ask, told;

static void *asks(void *unused)
{
    while (!over) {
        while (ask == told && !over) sched_yield();
        if (over) break;
        for (volatile int spin = below(2000); spin > 0; spin--);
        told++;
        pthread_kill(main_thread, SIGUSR2);
    }
    return unused;
}

static void test_once(void)
{
    struct pair these = pair();
    int set = watching(these);
    main_thread = pthread_self();
    pthread_t thread = beside(asks, 0, SIGALRM);
    for (int round = 1; round <= 3000; round++) {
        handle(SIGUSR2, once, SA_RESETHAND | SA_RESTART);
        ask++;
        while (ran < round) call(these, set);
        struct sigaction in_force;
        sigaction(SIGUSR2, 0, &in_force);
        if (in_force.sa_handler != SIG_DFL) strange++;
    }
    over = 1;
    pthread_join(thread, 0);
    printf("once: %ld, strange: %ld\n", ran, strange);
}

// Each function that sets or queries a handler reports what was set last, by whichever function.
static void one(int number) { printf("  one argument: %d\n", number); }
static void three(int number, siginfo_t *info, void *context)
{
    ucontext_t *where = context;
    printf("  three: %d, code %d, blocked before %d\n", number, info->si_code, sigismember(&where->uc_sigmask, SIGUSR2));
}
static int depth, again;
static void nests(int number)
{
    sigset_t now;
    pthread_sigmask(SIG_BLOCK, 0, &now);
    printf("  depth %d, itself blocked %d, SIGUSR2 %d\n", depth, sigismember(&now, number), sigismember(&now, SIGUSR2));
    depth++;
    if (again-- > 0) raise(number);
    depth--;
    printf("  and back\n");
}
static char other_stack[64 << 10];
static void where(int number)
{
    char here;
    printf("  on the other stack: %d\n", &here >= other_stack && &here < other_stack + sizeof other_stack);
}
static sigjmp_buf fault;
static void faults(int number, siginfo_t *info, void *context)
{
    printf("  fault %d at %p, code %d\n", number, info->si_addr, info->si_code);
    siglongjmp(fault, 1);
}

static const char *name_of(void *handler)
{
    struct { void *is; const char *name; } known[] = {{SIG_DFL, "default"}, {SIG_IGN, "ignore"}, {SIG_ERR, "error"}, {(void *)2, "hold"},
        {one, "one"}, {three, "three"}, {nests, "nests"}, {where, "where"}, {faults, "faults"}};
    for (int i = 0; i < 9; i++)
        if (known[i].is == handler) return known[i].name;
    return "a stranger";
}

static void tell(const char *what, int number)
{
    struct sigaction old;
    memset(&old, 0, sizeof old);
    int result = sigaction(number, 0, &old);
    printf("%s: %d, %s, flags %x, blocks", what, result, name_of(old.sa_handler), old.sa_flags & ~0x04000000);
    for (int i = 1; i < 65; i++)
        if (sigismember(&old.sa_mask, i) == 1) printf(" %d", i);
    printf("\n");
}

static void set(int number, void *handler, int flags, int blocks)
{
    struct sigaction new = {.sa_handler = handler, .sa_flags = flags}, old;
    if (blocks) sigaddset(&new.sa_mask, blocks);
    int result = sigaction(number, &new, &old);
    printf("sigaction %d: %d (%d), before %s, flags %x\n", number, result, result ? errno : 0, result ? "" : name_of(old.sa_handler),
           result ? 0 : old.sa_flags & ~0x04000000);
    tell("  now", number);
}

static void test_as_installed(void)
{
    setvbuf(stdout, 0, _IONBF, 0);
    pair();
    void *handlers[] = {SIG_DFL, one, SIG_IGN, three, one, nests};
    int flags[] = {0, SA_RESTART, 0, SA_SIGINFO | SA_NODEFER, SA_RESETHAND, SA_ONSTACK | SA_NOCLDSTOP};
    for (int i = 0; i < 6; i++) {
        set(SIGUSR1, handlers[i], flags[i], i % 2 ? SIGUSR2 : 0);
        if (i % 2) raise(SIGUSR1), tell("after it", SIGUSR1);
    }
    set(SIGUSR1, one, SA_RESETHAND, 0);
    raise(SIGUSR1);
    tell("once", SIGUSR1);
    set(SIGUSR1, three, SA_SIGINFO | SA_RESETHAND | SA_RESTART, SIGALRM);
    kill(getpid(), SIGUSR1);
    tell("once", SIGUSR1);
    set(SIGUSR1, nests, SA_NODEFER, SIGUSR2);
    again = 2;
    raise(SIGUSR1);
    set(SIGUSR1, nests, 0, 0);
    again = 2;
    raise(SIGUSR1);
    stack_t stack = {.ss_sp = other_stack, .ss_size = sizeof other_stack};
    sigaltstack(&stack, 0);
    set(SIGUSR1, where, SA_ONSTACK, 0);
    raise(SIGUSR1);
    set(SIGUSR1, where, 0, 0);
    raise(SIGUSR1);
    // The older functions: signal, siginterrupt, sysv_signal, sigset.
    printf("signal: %s\n", name_of(signal(SIGUSR1, one)));
    tell("  now", SIGUSR1);
    raise(SIGUSR1);
    printf("siginterrupt: %d\n", siginterrupt(SIGUSR1, 1));
    tell("  now", SIGUSR1);
    printf("signal: %s\n", name_of(signal(SIGUSR1, nests)));
    tell("  now", SIGUSR1);
    printf("siginterrupt: %d\n", siginterrupt(SIGUSR1, 0));
    tell("  now", SIGUSR1);
    printf("signal: %s\n", name_of(signal(SIGUSR1, SIG_IGN)));
    printf("signal: %s\n", name_of(signal(SIGUSR1, SIG_DFL)));
    printf("sysv_signal: %s\n", name_of(sysv_signal(SIGUSR1, one)));
    tell("  now", SIGUSR1);
    raise(SIGUSR1);
    tell("  after it", SIGUSR1);
    printf("sigset: %s\n", name_of(sigset(SIGUSR1, one)));
    tell("  now", SIGUSR1);
    printf("sigset: %s\n", name_of(sigset(SIGUSR1, SIG_HOLD)));
    printf("sigset: %s\n", name_of(sigset(SIGUSR1, nests)));
    printf("sigset: %s\n", name_of(sigset(SIGUSR1, SIG_IGN)));
    printf("sigset: %s\n", name_of(sigset(SIGUSR1, SIG_DFL)));
    // Invalid signals.
    int numbers[] = {0, -1, 65, 32, 33, SIGKILL, SIGSTOP};
    for (int i = 0; i < 7; i++) {
        set(numbers[i], one, 0, 0);
        errno = 0;
        void *was = signal(numbers[i], one);
        printf("signal %d: %s %d\n", numbers[i], name_of(was), errno);
        errno = 0;
        was = sigset(numbers[i], one);
        printf("sigset %d: %s %d\n", numbers[i], name_of(was), errno);
    }
    // By syscall(2).
    struct { void *handler; unsigned long flags; void *restorer; unsigned long mask; } kernels;
    set(SIGUSR1, one, SA_RESTART, SIGUSR2);
    int got = syscall(SYS_rt_sigaction, SIGUSR1, 0, &kernels, 8);
    printf("by number: %d, %s, %lx, %lx\n", got, name_of(kernels.handler), kernels.flags & ~0x04000000ul, kernels.mask);
    kernels.handler = three, kernels.flags |= SA_SIGINFO;
    got = syscall(SYS_rt_sigaction, SIGUSR1, &kernels, &kernels, 8);
    printf("by number: %d, %s, %lx, %lx\n", got, name_of(kernels.handler), kernels.flags & ~0x04000000ul, kernels.mask);
    tell("then", SIGUSR1);
    raise(SIGUSR1);
    got = syscall(SYS_rt_sigaction, SIGUSR1, 0, &kernels, 4);
    printf("of another length: %d %d\n", got, errno);
    // A fault is delivered immediately.
    set(SIGSEGV, faults, SA_SIGINFO | SA_NODEFER, 0);
    if (!sigsetjmp(fault, 1)) *(volatile int *)16 = 1;
    // Handlers are inherited by fork and reset by exec; ignored signals stay ignored.
    fflush(stdout);
    if (!fork()) {
        tell("child", SIGUSR1);
        raise(SIGUSR1);
        _exit(0);
    }
    wait(0);
    if (!fork()) {
        set(SIGUSR1, SIG_IGN, 0, 0);
        execl("/bin/sh", "sh", "-c", "grep -c 'SigIgn:.*2[0-9a-f][0-9a-f]$' /proc/self/status; grep SigBlk /proc/self/status", (char *)0);
    }
    wait(0);
}

static void nothing(int number, siginfo_t *info, void *context) { ran++; }

// After several signals at once none stays blocked.
static void test_several(void)
{
    struct sigaction alone = {.sa_sigaction = nothing, .sa_flags = SA_SIGINFO};
    sigfillset(&alone.sa_mask);
    handle(SIGUSR1, nothing, 0), sigaction(SIGUSR2, &alone, 0);
    struct pair these = pair();
    int set = watching(these), left = 0;
    pid_t parent = getpid(), child = fork();
    if (!child) {
        for (int i = 0; i < 150; i++) {
            usleep(2000 + below(1000));
            kill(parent, SIGSTOP), usleep(500);
            kill(parent, SIGUSR1), kill(parent, SIGUSR2), kill(parent, SIGCONT);
        }
        _exit(0);
    }
    while (!waitpid(child, 0, WNOHANG)) {
        sigset_t blocked, none;
        for (int i = 0; i < 50; i++) setsockopt(these.ours, SOL_SOCKET, SO_KEEPALIVE, &(int){i & 1}, 4);
        call(these, set);
        sigemptyset(&none);
        pthread_sigmask(SIG_SETMASK, &none, &blocked);
        left += sigismember(&blocked, SIGUSR1) || sigismember(&blocked, SIGUSR2);
    }
    printf("ran: %s, left blocked: %d\n", ran > 50 ? "often" : "seldom", left);
}

// A language runtime that stops its threads by signals while they use sockets and start programs.
static sem_t parked;
static volatile int epoch;

static void park(int number, siginfo_t *info, void *context)
{
    int mine = epoch, error = errno;
    sigset_t all;
    sigfillset(&all), sigdelset(&all, SIGUSR2);
    sem_post(&parked);
    while (epoch == mine) sigsuspend(&all);
    errno = error;
}

static void *uses_sockets(void *unused)
{
    for (int fd = socket(AF_INET, SOCK_STREAM, 0), i = 0; !over; i++) setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &(int){i & 1}, 4);
    return unused;
}

static void *starts_programs(void *unused)
{
    char *words[] = {"true", 0};
    for (pid_t child; !over; waitpid(child, 0, 0))
        if (posix_spawn(&child, "/bin/true", 0, 0, words, environ)) wrong++;
    return unused;
}

static void test_parks(void)
{
    struct sigaction parks = {.sa_sigaction = park, .sa_flags = SA_SIGINFO | SA_RESTART};
    sigfillset(&parks.sa_mask);
    sem_init(&parked, 0, 0), sigaction(SIGUSR1, &parks, 0), handle(SIGUSR2, nothing, SA_RESTART);
    pthread_t threads[2];
    pthread_create(threads, 0, uses_sockets, 0), pthread_create(threads + 1, 0, starts_programs, 0);
    usleep(100000);
    for (int round = 0; round < 60; round++) {
        struct timespec end;
        clock_gettime(CLOCK_REALTIME, &end), end.tv_sec += 30;
        for (int i = 0; i < 2; i++) pthread_kill(threads[i], SIGUSR1);
        for (int i = 0; i < 2; i++)
            while (sem_timedwait(&parked, &end))
                if (errno == ETIMEDOUT) printf("stands still\n"), fflush(stdout), _exit(1);
        epoch++;
        for (int i = 0; i < 2; i++) pthread_kill(threads[i], SIGUSR2);
        usleep(2000 + below(3000));
    }
    over = 1;
    for (int i = 0; i < 2; i++) pthread_join(threads[i], 0);
    printf("parked, wrong: %ld\n", wrong);
}

// Programs started while signals arrive begin with no signal blocked, by fork and by posix_spawn.
static void test_starts(void)
{
    handle(SIGALRM, nothing, SA_RESTART);
    struct pair these = pair();
    every(60);
    int good = 0;
    for (int i = 0; i < 40; i++) {
        int in[2];
        pipe(in);
        pid_t child = i % 2 ? -1 : fork();
        if (child < 0) {
            // By posix_spawn, with this thread's mask or with an explicit one.
            char *words[] = {"grep", "SigBlk", "/proc/self/status", 0};
            posix_spawn_file_actions_t actions;
            posix_spawnattr_t attributes;
            sigset_t none;
            sigemptyset(&none);
            posix_spawnattr_init(&attributes), posix_spawnattr_setsigmask(&attributes, &none);
            posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
            posix_spawn_file_actions_init(&actions), posix_spawn_file_actions_adddup2(&actions, in[1], 1);
            for (double end = now() + 0.002; now() < end;) call(these, listener);
            if (posix_spawn(&child, "/bin/grep", &actions, i % 4 == 1 ? &attributes : 0, words, environ)) perror("posix_spawn"), exit(1);
            posix_spawn_file_actions_destroy(&actions);
        }
        if (!child) {
            struct itimerval in_force;
            every(60);
            for (double end = now() + 0.002; now() < end;) call(these, listener);
            getitimer(ITIMER_REAL, &in_force);
            every(0);
            dup2(in[1], 1);
            execl("/bin/grep", "grep", "SigBlk", "/proc/self/status", (char *)0);
            _exit(1);
        }
        close(in[1]);
        char line[100] = {0};
        for (int at = 0, got; (got = read(in[0], line + at, sizeof line - 1 - at)) != 0;) at += got > 0 ? got : 0;
        good += strstr(line, "0000000000000000") != 0;
        close(in[0]);
        while (waitpid(child, 0, 0) < 0);
    }
    every(0);
    printf("began well: %d\n", good);
}

// A process that is stopped during a blocking call and continued. No handler runs. `went_on` becomes readable afterwards.
static int went_on[2];

static void stop(void)
{
    pid_t parent = getpid();
    if (fork()) return;
    char name[50], line[400];
    snprintf(name, sizeof name, "/proc/%d/stat", parent);
    for (int asleep = 0; asleep < 12; usleep(5000)) {
        FILE *file = fopen(name, "r");
        char *state = fgets(line, sizeof line, file) ? strrchr(line, ')') : 0;
        asleep = state && state[2] == 'S' ? asleep + 1 : 0;
        fclose(file);
    }
    kill(parent, SIGSTOP);
    usleep(60000), kill(parent, SIGCONT);
    usleep(100000), write(went_on[1], "x", 1);
    _exit(0);
}

static void *sends_later(void *fd)
{
    char byte;
    read(went_on[0], &byte, 1);
    send(*(int *)fd, "x", 1, 0);
    return 0;
}

static void test_stops(void)
{
    handle(SIGUSR1, nothing, 0), handle(SIGUSR2, nothing, SA_RESTART), pipe(went_on);
    struct pair these = pair();
    int set = watching(these);
    struct timeval limit = {30};
    const char *names[] = {"recv", "recv in time", "poll", "poll in time", "select", "epoll_wait", "epoll_wait in time", "accept"};
    for (int i = 0; i < 8; i++) {
        pthread_t thread;
        struct pollfd ready = {these.theirs, POLLIN};
        struct epoll_event event;
        fd_set in;
        char bytes[9];
        int result = -1, wakes = these.ours;
        FD_ZERO(&in);
        FD_SET(these.theirs, &in);
        if (i == 1) setsockopt(these.theirs, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
        stop();
        if (i < 7) pthread_create(&thread, 0, sends_later, &wakes);
        errno = 0;
        switch (i) {
        case 0: case 1: result = recv(these.theirs, bytes, 9, 0); break;
        case 2: result = poll(&ready, 1, -1); break;
        case 3: result = poll(&ready, 1, 30000); break;
        case 4: result = select(these.theirs + 1, &in, 0, 0, 0); break;
        case 5: result = epoll_wait(set, &event, 1, -1); break;
        case 6: result = epoll_wait(set, &event, 1, 30000); break;
        case 7: result = accept(listener, 0, 0) > 0; break;
        }
        printf("%s: %d %s\n", names[i], result, result < 0 ? strerror(errno) : "");
        if (i < 7) pthread_join(thread, 0);
        struct timeval none = {0};
        setsockopt(these.theirs, SOL_SOCKET, SO_RCVTIMEO, &none, sizeof none);
        // Receives the byte unless the tested call did.
        if (i < 7 && (i > 1 || result < 0)) recv(these.theirs, bytes, 9, 0);
        while (waitpid(-1, 0, 0) > 0);
        if (i == 6 && !fork()) {
            read(went_on[0], bytes, 1);
            connect(socket(AF_INET, SOCK_STREAM, 0), (void *)&at, sizeof at);
            _exit(0);
        }
    }
}

int main(int count, char **arguments)
{
    struct { const char *name; void (*run)(void); } all[] = {{"jumps", test_jumps}, {"uses", test_uses}, {"queue", test_queue},
        {"threads", test_threads}, {"once", test_once}, {"as_installed", test_as_installed}, {"starts", test_starts}, {"stops", test_stops}, {"several", test_several}, {"parks", test_parks}};
    listens();
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (!strcmp(all[i].name, arguments[1])) all[i].run();
    return 0;
}
