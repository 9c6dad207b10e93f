// Pointers that cannot be read or written: each call fails with EFAULT, and the program goes on. The output
// must be the same on a stack and on the kernel.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

static struct sockaddr_in at;
static int listener;
// Two pages: the first can be accessed, the second cannot. `edge` is the address of the second.
static char *page, *edge;
static char *bad[5];
static const char *names[] = {"null", "low", "unmapped", "kernel", "last"};

static void say(const char *call, const char *which, long result)
{
    printf("%s %s: %ld %s\n", call, which, result, result < 0 ? strerrorname_np(errno) : "");
}

static void starts(void)
{
    page = mmap(0, 3 * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    edge = page + 4096;
    mprotect(edge, 2 * 4096, PROT_NONE);
    bad[0] = 0, bad[1] = (char *)8, bad[2] = edge, bad[3] = (char *)(1ul << 63), bad[4] = (char *)-1;
    listener = socket(AF_INET, SOCK_STREAM, 0);
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = inet_addr("127.0.0.1");
    bind(listener, (void *)&at, sizeof at);
    socklen_t n = sizeof at;
    getsockname(listener, (void *)&at, &n);
    listen(listener, 50);
}

static int connected(int *theirs)
{
    int new = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(new, (void *)&at, sizeof at)) perror("connect"), exit(1);
    *theirs = accept(listener, 0, 0);
    return new;
}

static void await(int fd)
{
    struct pollfd ready = {fd, POLLIN, 0};
    if (poll(&ready, 1, 5000) != 1) puts("nothing came"), exit(1);
}

// Receives everything that is on its way.
static void drain(int fd)
{
    char room[100];
    usleep(50000);
    while (recv(fd, room, sizeof room, MSG_DONTWAIT) >= 0);
}

static void streams(void)
{
    int theirs, ours = connected(&theirs);
    static char room[10000];
    for (int i = 0; i < 5; i++) {
        struct iovec one = {bad[i], 10}, two[] = {{room, 10}, {bad[i], 10}};
        struct msghdr inner = {.msg_iov = &one, .msg_iovlen = 1};
        struct msghdr outer = {.msg_iov = (void *)bad[i], .msg_iovlen = 1};
        struct msghdr name = {.msg_iov = two, .msg_iovlen = 1, .msg_name = bad[i], .msg_namelen = 16};
        struct msghdr control = {.msg_iov = two, .msg_iovlen = 1, .msg_control = bad[i], .msg_controllen = 32};
        say("send", names[i], send(ours, bad[i], 10, 0));
        say("write", names[i], write(ours, bad[i], 10));
        say("sendto", names[i], sendto(ours, bad[i], 10, 0, 0, 0));
        say("sendto its address", names[i], sendto(ours, room, 10, 0, (void *)bad[i], 16));
        say("writev", names[i], writev(ours, (void *)bad[i], 1));
        say("writev inside", names[i], writev(ours, &one, 1));
        say("writev second", names[i], writev(ours, two, 2));
        say("sendmsg", names[i], sendmsg(ours, (void *)bad[i], 0));
        say("sendmsg its buffers", names[i], sendmsg(ours, &outer, 0));
        say("sendmsg its buffer", names[i], sendmsg(ours, &inner, 0));
        if (i) say("sendmsg its address", names[i], sendmsg(ours, &name, 0));
        say("sendmsg its control", names[i], sendmsg(ours, &control, 0));
        say("sendmmsg", names[i], sendmmsg(ours, (void *)bad[i], 1, 0));
        say("urgent", names[i], send(ours, bad[i], 10, MSG_OOB));
        say("recv nothing", names[i], recv(ours, bad[i], 10, MSG_DONTWAIT));
    }
    // What was sent, although an address was bad: TCP ignores it, but the kernel reads it first.
    memset(room, 7, sizeof room), await(theirs);
    say("drain", "", recv(theirs, room, sizeof room, MSG_DONTWAIT));
    // Writes that can be read in part.
    memcpy(edge - 6, "abcdef", 6);
    say("send partly", "", send(ours, edge - 6, 10, 0));
    struct iovec parts[] = {{edge - 3, 3}, {edge - 6, 10}};
    say("writev partly", "", writev(ours, parts, 2));
    say("nothing came", "", recv(theirs, room, sizeof room, MSG_DONTWAIT));
    for (int i = 0; i < 5; i++) {
        struct iovec one = {bad[i], 10}, two[] = {{room, 3}, {bad[i], 10}};
        struct msghdr inner = {.msg_iov = &one, .msg_iovlen = 1};
        struct msghdr outer = {.msg_iov = (void *)bad[i], .msg_iovlen = 1};
        say("send", "data", send(ours, "0123456789", 10, 0));
        await(theirs);
        say("recv", names[i], recv(theirs, bad[i], 10, 0));
        say("read", names[i], read(theirs, bad[i], 10));
        say("peek", names[i], recv(theirs, bad[i], 10, MSG_PEEK));
        say("peek all", names[i], recv(theirs, bad[i], 10, MSG_PEEK | MSG_WAITALL));
        say("recvfrom", names[i], recvfrom(theirs, bad[i], 10, 0, 0, 0));
        say("readv", names[i], readv(theirs, (void *)bad[i], 1));
        say("readv inside", names[i], readv(theirs, &one, 1));
        say("readv second", names[i], readv(theirs, two, 2));
        say("recvmsg", names[i], recvmsg(theirs, (void *)bad[i], 0));
        say("recvmsg its buffers", names[i], recvmsg(theirs, &outer, 0));
        say("recvmsg its buffer", names[i], recvmsg(theirs, &inner, 0));
        say("recvmmsg", names[i], recvmmsg(theirs, (void *)bad[i], 1, 0, 0));
        say("recv", "all", recv(theirs, room, 10, 0));
        printf("%.10s\n", room);
    }
    say("send", "data", send(ours, "0123456789", 10, 0));
    await(theirs);
    say("recv partly", "", recv(theirs, edge - 4, 10, 0));
    say("recv what fits", "", recv(theirs, edge - 4, 4, 0));
    printf("%.4s\n", edge - 4);
    say("discard", "", recv(theirs, 0, 3, MSG_TRUNC));
    say("recv", "all", recv(theirs, room, 10, 0));
    printf("%.3s\n", room);
    // The address of the sender of a stream, which has none.
    for (int i = 0; i < 5; i++) {
        socklen_t n = 16;
        send(ours, "x", 1, 0), await(theirs);
        say("recvfrom its address", names[i], recvfrom(theirs, room, 1, 0, (void *)bad[i], &n));
        recv(theirs, room, 1, MSG_DONTWAIT);
        send(ours, "x", 1, 0), await(theirs);
        say("recvfrom its length", names[i], recvfrom(theirs, room, 1, 0, (void *)room, (void *)bad[i]));
        recv(theirs, room, 1, MSG_DONTWAIT);
        struct iovec one = {room, 1};
        struct msghdr name = {.msg_iov = &one, .msg_iovlen = 1, .msg_name = bad[i], .msg_namelen = 16};
        send(ours, "x", 1, 0), await(theirs);
        say("recvmsg its address", names[i], recvmsg(theirs, &name, 0));
        recv(theirs, room, 1, MSG_DONTWAIT);
    }
    // The urgent byte.
    send(ours, "u", 1, MSG_OOB);
    struct pollfd urgent = {theirs, POLLPRI, 0};
    poll(&urgent, 1, 5000);
    say("recv urgent", "bad", recv(theirs, edge, 1, MSG_OOB));
    close(ours), close(theirs);
}

static void datagrams(void)
{
    int a = socket(AF_INET, SOCK_DGRAM, 0), b = socket(AF_INET, SOCK_DGRAM, 0);
    struct sockaddr_in here = {.sin_family = AF_INET, .sin_addr = {inet_addr("127.0.0.1")}};
    socklen_t n = sizeof here;
    static char room[100];
    bind(a, (void *)&here, sizeof here), getsockname(a, (void *)&here, &n);
    connect(b, (void *)&here, sizeof here);
    send(b, "first", 5, 0), await(a), recv(a, room, 100, 0);
    for (int i = 0; i < 5; i++) {
        struct iovec one = {bad[i], 10}, two[] = {{room, 3}, {bad[i], 10}}, good = {room, 10};
        struct msghdr inner = {.msg_iov = &one, .msg_iovlen = 1};
        struct msghdr control = {.msg_iov = &good, .msg_iovlen = 1, .msg_control = bad[i], .msg_controllen = 32};
        struct mmsghdr many[] = {{{.msg_iov = &good, .msg_iovlen = 1}}, {{.msg_iov = &one, .msg_iovlen = 1}}};
        struct sockaddr_in from;
        say("udp send", names[i], send(b, bad[i], 10, 0));
        say("udp sendto", names[i], sendto(b, bad[i], 10, 0, (void *)&here, n));
        say("udp sendto its address", names[i], sendto(b, room, 10, 0, (void *)bad[i], 16));
        say("udp writev", names[i], writev(b, two, 2));
        say("udp sendmsg", names[i], sendmsg(b, &inner, 0));
        say("udp sendmsg its control", names[i], sendmsg(b, &control, 0));
        say("udp more", names[i], send(b, bad[i], 10, MSG_MORE));
        say("udp sendmmsg", names[i], sendmmsg(b, many, 2, 0));
        drain(a);
        // A datagram that cannot be stored is lost, unless the call only peeks.
        send(b, "0123456789", 10, 0), await(a);
        say("udp peek", names[i], recv(a, bad[i], 10, MSG_PEEK));
        say("udp recv", names[i], recv(a, bad[i], 10, 0));
        say("udp recv", "again", recv(a, room, 10, MSG_DONTWAIT));
        n = sizeof from;
        send(b, "0123456789", 10, 0), await(a);
        say("udp recvfrom its address", names[i], recvfrom(a, room, 10, 0, (void *)bad[i], &n));
        say("udp recv", "again", recv(a, room, 10, MSG_DONTWAIT));
        send(b, "0123456789", 10, 0), await(a);
        say("udp recvfrom its length", names[i], recvfrom(a, room, 10, 0, (void *)&from, (void *)bad[i]));
        n = sizeof here;
        say("udp recv", "again", recv(a, room, 10, MSG_DONTWAIT));
        setsockopt(a, IPPROTO_IP, IP_RECVTTL, &(int){1}, 4);
        send(b, "0123456789", 10, 0), await(a);
        control.msg_controllen = 64;
        say("udp recvmsg its control", names[i], recvmsg(a, &control, 0));
        printf("control %zu flags %x\n", control.msg_controllen, control.msg_flags);
        setsockopt(a, IPPROTO_IP, IP_RECVTTL, &(int){0}, 4);
        // The second of two messages.
        send(b, "1", 1, 0), send(b, "2", 1, 0), usleep(50000);
        say("udp recvmmsg", names[i], recvmmsg(a, many, 2, MSG_DONTWAIT, 0));
        send(b, "1", 1, 0), await(a);
        if (i) say("udp recvmmsg its time", names[i], recvmmsg(a, many, 1, MSG_DONTWAIT, (void *)bad[i]));
        drain(a);
    }
    // A second header that cannot be read.
    struct iovec good = {room, 10};
    struct mmsghdr *last = (void *)(edge - sizeof *last);
    *last = (struct mmsghdr){{.msg_iov = &good, .msg_iovlen = 1}};
    say("udp sendmmsg", "to the edge", sendmmsg(b, last, 2, 0));
    await(a);
    say("udp recvmmsg", "to the edge", recvmmsg(a, last, 2, MSG_DONTWAIT, 0));
    close(a), close(b);
}

static void others(void)
{
    for (int i = 0; i < 5; i++) {
        int theirs, fd = socket(AF_INET, SOCK_STREAM, 0);
        socklen_t n = 16;
        char value[64];
        say("bind", names[i], bind(fd, (void *)bad[i], 16));
        say("connect", names[i], connect(fd, (void *)bad[i], 16));
        close(fd);
        fd = socket(AF_INET, SOCK_STREAM, 0);
        connect(fd, (void *)&at, sizeof at);
        // The connection is lost.
        if (i) {
            say("accept", names[i], accept(listener, (void *)bad[i], &n));
            say("recv", "after accept", recv(fd, value, 1, 0));
        } else {
            close(accept(listener, 0, 0));
        }
        close(fd);
        fd = socket(AF_INET, SOCK_STREAM, 0);
        connect(fd, (void *)&at, sizeof at);
        say("accept its length", names[i], accept(listener, (void *)value, (void *)bad[i]));
        say("recv", "after accept", recv(fd, value, 1, 0));
        close(fd);
        fd = connected(&theirs);
        say("getsockname", names[i], getsockname(fd, (void *)bad[i], &n));
        say("getsockname its length", names[i], getsockname(fd, (void *)value, (void *)bad[i]));
        say("getpeername", names[i], getpeername(fd, (void *)bad[i], &n));
        say("getpeername its length", names[i], getpeername(fd, (void *)value, (void *)bad[i]));
        n = 4;
        say("getsockopt", names[i], getsockopt(fd, SOL_SOCKET, SO_REUSEADDR, bad[i], &n));
        say("getsockopt its length", names[i], getsockopt(fd, SOL_SOCKET, SO_REUSEADDR, value, (void *)bad[i]));
        say("getsockopt tcp", names[i], getsockopt(fd, IPPROTO_TCP, TCP_INFO, bad[i], &n));
        say("setsockopt", names[i], setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, bad[i], 4));
        say("setsockopt tcp", names[i], setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, bad[i], 4));
        say("setsockopt ip", names[i], setsockopt(fd, IPPROTO_IP, IP_TTL, bad[i], 4));
        say("FIONREAD", names[i], ioctl(fd, FIONREAD, bad[i]));
        say("FIONBIO", names[i], ioctl(fd, FIONBIO, bad[i]));
        say("SIOCATMARK", names[i], ioctl(fd, 0x8905, bad[i]));
        say("SIOCGIFCONF", names[i], ioctl(fd, 0x8912, bad[i]));
        say("SIOCGIFADDR", names[i], ioctl(fd, 0x8915, bad[i]));
        struct ifconf interfaces = {.ifc_len = 400, .ifc_buf = bad[i]};
        if (i) say("SIOCGIFCONF its list", names[i], ioctl(fd, 0x8912, &interfaces));
        struct sock_fprog filter = {1, (void *)bad[i]};
        say("SO_ATTACH_FILTER its code", names[i], setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &filter, sizeof filter));
        if (i) say("sendfile", names[i], sendfile(fd, open("/etc/passwd", O_RDONLY), (void *)bad[i], 10));
        close(fd), close(theirs);
    }
}

static void waits(void)
{
    int theirs, ours = connected(&theirs), set = epoll_create1(0);
    struct epoll_event event = {EPOLLIN | EPOLLET, {.fd = 1}};
    for (int i = 0; i < 5; i++) {
        say("poll", names[i], poll((void *)bad[i], 1, 0));
        struct timeval none = {0};
        if (i) {
            say("select", names[i], select(theirs + 1, (void *)bad[i], 0, 0, &none));
            say("select second", names[i], select(theirs + 1, 0, (void *)bad[i], 0, &none));
        }
        say("epoll_ctl", names[i], epoll_ctl(set, EPOLL_CTL_ADD, theirs, (void *)bad[i]));
        say("epoll_wait nothing", names[i], epoll_wait(set, (void *)bad[i], 1, 0));
        if (!i) continue;
        struct timespec now = {0};
        struct pollfd one = {theirs, POLLIN, 0};
        fd_set read;
        FD_ZERO(&read);
        FD_SET(theirs, &read);
        say("ppoll its mask", names[i], ppoll(&one, 1, &now, (void *)bad[i]));
        say("pselect its mask", names[i], pselect(theirs + 1, &read, 0, 0, &now, (void *)bad[i]));
        say("epoll_pwait its mask", names[i], epoll_pwait(set, &event, 1, 0, (void *)bad[i]));
        say("epoll_pwait2 its mask", names[i], epoll_pwait2(set, &event, 1, &now, (void *)bad[i]));
        say("epoll_pwait2 its time", names[i], epoll_pwait2(set, &event, 1, (void *)bad[i], 0));
        // The functions of libc read the time themselves.
        say("ppoll its time", names[i], syscall(SYS_ppoll, &one, 1, bad[i], 0, 8));
        say("pselect its time", names[i], syscall(SYS_pselect6, theirs + 1, &read, 0, 0, bad[i], 0));
        say("pselect its mask", "and size", syscall(SYS_pselect6, theirs + 1, &read, 0, 0, &now, bad[i]));
    }
    // A set that reaches over the edge, with a bit of a stack socket in the part that can be read.
    fd_set *whole = (void *)page;
    FD_ZERO(whole);
    FD_SET(theirs, whole);
    struct timeval none = {0};
    say("select", "read and bad", select(theirs + 1, whole, (void *)edge, 0, &none));
    // A list of which the second element cannot be read.
    struct pollfd *list = (void *)(edge - sizeof *list);
    *list = (struct pollfd){theirs, POLLIN, 0};
    say("poll", "over the edge", poll(list, 2, 0));
    struct pollfd *bits = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    bits[0] = *list;
    mprotect(bits, 4096, PROT_READ);
    say("poll", "read only", poll(bits, 1, 0));
    send(ours, "x", 1, 0), await(theirs);
    say("poll", "read only, ready", poll(bits, 1, 0));
    // Events that cannot be stored are not lost, even if they are reported once only.
    epoll_ctl(set, EPOLL_CTL_ADD, theirs, &event);
    for (int i = 0; i < 5; i++) say("epoll_wait", names[i], epoll_wait(set, (void *)bad[i], 1, 0));
    say("epoll_wait", "good", epoll_wait(set, &event, 1, 0));
    say("epoll_wait", "good again", epoll_wait(set, &event, 1, 0));
    say("epoll_wait", "too many events", epoll_wait(set, &event, 0x7fffffff, 0));
    epoll_ctl(set, EPOLL_CTL_ADD, ours, &(struct epoll_event){EPOLLOUT | EPOLLET, {.fd = 2}});
    epoll_ctl(set, EPOLL_CTL_MOD, theirs, &(struct epoll_event){EPOLLIN | EPOLLET, {.fd = 1}});
    struct epoll_event *one = (void *)(edge - sizeof *one);
    say("epoll_wait", "one of two", epoll_wait(set, one, 2, 0));
    say("epoll_wait", "the other", epoll_wait(set, one, 1, 0));
    say("epoll_wait", "no more", epoll_wait(set, one, 1, 0));
    close(ours), close(theirs), close(set);
}

// Faults of the program itself, which arrive as without the library.
static sigjmp_buf out;
static volatile int caught, code;
static void *volatile where;
static int stream;
static char *volatile target;
static char below[65536];
static volatile int on_stack;

static void faulted(int number, siginfo_t *info, void *context)
{
    char here;
    caught = number, code = info->si_code, where = info->si_addr;
    on_stack = &here >= below && &here < below + sizeof below;
    (void)context;
    siglongjmp(out, 1);
}

static void plain(int number)
{
    caught = number;
    siglongjmp(out, 1);
}

static void faults(const char *how)
{
    caught = code = 0, where = 0;
    if (!sigsetjmp(out, 1)) *target = 1;
    printf("%s: signal %d code %d address %s stack %d\n", how, caught, code, where == target ? "right" : "wrong", on_stack);
    say("send", "bad", send(stream, edge, 10, 0));
}

static void disposition(int number)
{
    struct sigaction now;
    sigaction(number, 0, &now);
    void *handler = now.sa_flags & SA_SIGINFO ? (void *)now.sa_sigaction : (void *)now.sa_handler;
    printf("disposition of %d: %s flags %x mask %d\n", number,
        handler == SIG_DFL ? "default" : handler == SIG_IGN ? "ignored" : handler == (void *)faulted ? "faulted"
        : handler == (void *)plain ? "plain" : "strange", now.sa_flags & ~0x04000000, sigismember(&now.sa_mask, SIGUSR1));
}

static int recursive(volatile char *up)
{
    volatile char more[1024];
    more[0] = *up;
    return more[0] == 1 ? 0 : recursive(more) + more[0];
}

// Ends in a child; says how. Without core files.
static void child(const char *how, void (*run)(void))
{
    fflush(stdout);
    pid_t pid = fork();
    if (!pid) {
        setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
        run();
        _exit(0);
    }
    int status;
    waitpid(pid, &status, 0);
    printf("child %s: %s %d\n", how, WIFSIGNALED(status) ? "signal" : "exit", WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
}

static void writes(void) { *target = 1; }
static void blocked(void)
{
    sigset_t all;
    sigfillset(&all), sigprocmask(SIG_SETMASK, &all, 0);
    *target = 1;
}
static void sends(void) { kill(getpid(), SIGSEGV); pause(); }
static void raises(void) { raise(SIGBUS); }
static void ignores(void)
{
    signal(SIGSEGV, SIG_IGN);
    raise(SIGSEGV);
    int theirs, ours = connected(&theirs);
    if (send(ours, edge, 10, 0) != -1 || errno != EFAULT) _exit(1);
    disposition(SIGSEGV), fflush(stdout);
    *target = 1;
}
static void overflows(void)
{
    sigaltstack(&(stack_t){.ss_sp = below, .ss_size = sizeof below}, 0);
    sigaction(SIGSEGV, &(struct sigaction){.sa_sigaction = faulted, .sa_flags = SA_SIGINFO | SA_ONSTACK}, 0);
    if (!sigsetjmp(out, 1)) recursive("");
    _exit(10 + on_stack);
}
static void executes(void)
{
    signal(SIGSEGV, SIG_IGN), signal(SIGBUS, SIG_DFL);
    execl("/bin/grep", "grep", "SigIgn", "/proc/self/status", NULL);
}
static void truncated(void)
{
    char name[] = "/tmp/bad-pointers-XXXXXX";
    int file = mkstemp(name), theirs, ours = connected(&theirs);
    unlink(name);
    ftruncate(file, 4096);
    char *map = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    ftruncate(file, 0);
    say("send", "truncated", send(ours, map, 10, 0));
    send(theirs, "0123456789", 10, 0), await(ours);
    say("recv", "truncated", recv(ours, map, 10, 0));
    fflush(stdout);
    target = map;
    *target = 1;
}

static void *faults_in_a_thread(void *unused)
{
    // One at a time: otherwise a thread may accept the connection of another one.
    static pthread_mutex_t connecting = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&connecting);
    int theirs, ours = connected(&theirs), wrong = 0;
    pthread_mutex_unlock(&connecting);
    char room[16];
    for (int round = 0; round < 2000; round++) {
        if (send(ours, edge - round % 8, 16, 0) != -1 || errno != EFAULT) wrong++;
        if (send(ours, "0123456789", 10, 0) != 10) wrong++;
        await(theirs);
        if (recv(theirs, edge - round % 8, 10, 0) != -1 || errno != EFAULT) wrong++;
        if (recv(theirs, room, 16, 0) != 10) wrong++;
    }
    close(ours), close(theirs);
    return (void *)(long)wrong + (long)unused;
}

static void program(void)
{
    int theirs, ours = connected(&theirs);
    stream = ours, target = edge + 8;
    disposition(SIGSEGV), disposition(SIGBUS);
    sigaltstack(&(stack_t){.ss_sp = below, .ss_size = sizeof below}, 0);
    struct sigaction action = {.sa_sigaction = faulted, .sa_flags = SA_SIGINFO};
    sigaddset(&action.sa_mask, SIGUSR1);
    sigaction(SIGSEGV, &action, 0), disposition(SIGSEGV);
    say("send", "bad", send(ours, edge, 10, 0));
    faults("its handler"), disposition(SIGSEGV);
    action.sa_flags |= SA_ONSTACK | SA_NODEFER;
    sigaction(SIGSEGV, &action, 0), disposition(SIGSEGV);
    say("send", "bad", send(ours, edge, 10, 0));
    faults("on its stack");
    action.sa_flags = SA_SIGINFO | SA_RESETHAND;
    sigaction(SIGSEGV, &action, 0);
    say("send", "bad", send(ours, edge, 10, 0));
    disposition(SIGSEGV);
    faults("once"), disposition(SIGSEGV);
    signal(SIGSEGV, plain), disposition(SIGSEGV);
    say("send", "bad", send(ours, edge, 10, 0));
    faults("plain");
    printf("was %d\n", signal(SIGSEGV, SIG_DFL) == plain);
    disposition(SIGSEGV);
    printf("was %d\n", signal(SIGSEGV, SIG_IGN) == SIG_DFL);
    printf("was %d\n", signal(SIGSEGV, SIG_DFL) == SIG_IGN);
    say("send", "bad", send(ours, edge, 10, 0));
    child("faults", writes);
    child("faults with all signals blocked", blocked);
    child("gets a signal", sends);
    child("sends a signal", raises);
    child("ignores it", ignores);
    child("overflows its stack", overflows);
    child("executes another program", executes);
    child("uses a truncated file", truncated);
    pthread_t threads[3];
    long wrong = 0;
    for (int i = 0; i < 3; i++) pthread_create(&threads[i], 0, faults_in_a_thread, 0);
    for (int i = 0; i < 3; i++) { void *one; pthread_join(threads[i], &one), wrong += (long)one; }
    printf("wrong in threads: %ld\n", wrong);
    close(ours), close(theirs);
}

static int here, there;

// Calls with bad pointers and with good ones.
static void calls(const char *how)
{
    char room[16] = "";
    struct iovec parts[] = {{room, 2}, {edge, 10}};
    sigset_t before, after;
    sigprocmask(0, 0, &before);
    printf("%s: blocked %d %d\n", how, sigismember(&before, SIGSEGV), sigismember(&before, SIGBUS));
    say("send", "bad", send(here, edge, 10, 0));
    say("send", "partly", send(here, edge - 6, 10, 0));
    say("writev inside", "bad", writev(here, parts, 2));
    say("writev", "bad", writev(here, (void *)edge, 2));
    say("send", "good", send(here, "0123456789", 10, 0));
    await(there);
    say("recv", "bad", recv(there, edge, 10, 0));
    say("getsockname", "bad", getsockname(there, (void *)edge, (void *)edge));
    say("setsockopt", "bad", setsockopt(there, IPPROTO_TCP, TCP_NODELAY, edge, 4));
    say("recv", "good", recv(there, room, sizeof room, 0));
    printf("%.10s\n", room);
    sigprocmask(0, 0, &after);
    printf("mask %s\n", memcmp(&before, &after, 8) ? "changed" : "stays");
}

static void *calls_in_a_thread(void *how)
{
    calls(how);
    return 0;
}

static void thread(const char *how, const sigset_t *mask)
{
    pthread_t thread;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    if (mask) pthread_attr_setsigmask_np(&attributes, mask);
    pthread_create(&thread, &attributes, calls_in_a_thread, (void *)how);
    pthread_join(thread, 0);
}

static void calls_in_a_handler(int number)
{
    caught = number;
    calls("handler");
}

static void leaves(int number)
{
    calls("handler that jumps");
    siglongjmp(out, number);
}

static void faults_while_blocked(void)
{
    sigset_t all;
    sigfillset(&all), sigprocmask(SIG_SETMASK, &all, 0);
    calls("child");
    signal(SIGSEGV, plain);
    fflush(stdout);
    if (!sigsetjmp(out, 1)) *edge = 1;
    puts("not reached");
}

static void executes_itself(void)
{
    sigset_t all;
    sigfillset(&all), sigprocmask(SIG_SETMASK, &all, 0);
    execl("/proc/self/exe", "bad_pointers", "inherits", NULL);
}

static void connects(void)
{
    here = connected(&there);
}

static void blocks_faults(void)
{
    sigset_t none, all, faults, bus;
    sigemptyset(&none), sigfillset(&all), sigemptyset(&faults), sigemptyset(&bus);
    sigaddset(&faults, SIGSEGV), sigaddset(&faults, SIGBUS), sigaddset(&bus, SIGBUS);
    connects();
    calls("usual");
    sigprocmask(SIG_SETMASK, &all, 0), calls("all"), calls("all again");
    thread("thread that inherits", 0);
    thread("thread with a mask", &none);
    sigprocmask(SIG_UNBLOCK, &faults, 0), calls("unblocked");
    thread("thread with faults blocked", &faults);
    pthread_sigmask(SIG_BLOCK, &bus, 0), calls("only SIGBUS");
    sigprocmask(SIG_SETMASK, &none, 0), calls("none");
    sighold(SIGSEGV), calls("sighold"), sigrelse(SIGSEGV);
    sigset(SIGSEGV, SIG_HOLD), calls("sigset"), sigset(SIGSEGV, SIG_DFL);
    sigblock(1 << (SIGSEGV - 1)), calls("sigblock"), sigsetmask(0);
    sigsetmask(1 << (SIGSEGV - 1)), calls("sigsetmask"), sigsetmask(0);
    syscall(SYS_rt_sigprocmask, SIG_BLOCK, &faults, 0, 8), calls("system call");
    syscall(SYS_rt_sigprocmask, SIG_UNBLOCK, &faults, 0, 8), calls("system call to unblock");
    struct sigaction action = {.sa_handler = calls_in_a_handler, .sa_mask = all};
    sigaction(SIGUSR1, &action, 0), raise(SIGUSR1), calls("after the handler");
    sigprocmask(SIG_BLOCK, &faults, 0);
    raise(SIGUSR1), calls("after the handler, blocked");
    sigprocmask(SIG_SETMASK, &none, 0);
    action.sa_handler = leaves, sigaction(SIGUSR1, &action, 0);
    if (!sigsetjmp(out, 1)) raise(SIGUSR1);
    calls("after the jump");
    sigaction(SIGSEGV, &(struct sigaction){.sa_handler = leaves}, 0);
    if (!sigsetjmp(out, 1)) *edge = 1;
    calls("after a handler of the fault");
    signal(SIGSEGV, SIG_DFL);

    // A signal that was sent stays pending.
    for (int round = 0; round < 2; round++) {
        sigprocmask(SIG_BLOCK, &faults, 0);
        sigaction(SIGSEGV, &(struct sigaction){.sa_handler = round ? plain : SIG_DFL}, 0);
        caught = 0;
        kill(getpid(), SIGSEGV);
        char room[16];
        say("send", "pending", send(here, "0123456789", 10, 0));
        await(there);
        say("recv", "pending", recv(there, room, 16, 0));
        sigset_t pending;
        sigpending(&pending);
        printf("pending %d caught %d\n", sigismember(&pending, SIGSEGV), caught);
        signal(SIGSEGV, plain);
        if (!sigsetjmp(out, 0)) sigprocmask(SIG_UNBLOCK, &faults, 0);
        printf("caught %d\n", caught);
        sigprocmask(SIG_SETMASK, &none, 0);
    }
    signal(SIGSEGV, SIG_DFL);
    child("faults while blocked", faults_while_blocked);
    child("executes itself", executes_itself);
}

// For a program that a sanitizer watches: its handler reports the second fault.
static void sanitized(void)
{
    int theirs, ours = connected(&theirs);
    say("send", "bad", send(ours, edge, 10, 0));
    fflush(stdout);
    target = edge;
    *target = 1;
}

int main(int argc, char **argv)
{
    setvbuf(stdout, 0, _IOLBF, 0);
    starts();
    (void)argc;
    if (!strcmp(argv[1], "streams")) streams();
    if (!strcmp(argv[1], "datagrams")) datagrams();
    if (!strcmp(argv[1], "others")) others();
    if (!strcmp(argv[1], "waits")) waits();
    if (!strcmp(argv[1], "program")) program();
    if (!strcmp(argv[1], "blocked")) blocks_faults();
    if (!strcmp(argv[1], "inherits")) connects(), calls("inherited");
    if (!strcmp(argv[1], "sanitized")) sanitized();
    puts("end");
}
