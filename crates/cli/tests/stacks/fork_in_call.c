// A handler that libc does not know interrupts calls of this program and forks. Such a child must share no memory with
// the stack: nothing that the call does when it continues may reach the parent.
//
// fork_in_call FILE   makes calls on a connection to itself while a timer forks, until FILE is gone. Prints in which
//                     kinds of children the memory of the stack was private, and whether any had it both ways.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

enum { OUTSIDE = 1, ISOLATED = 2, PARTLY = 3 };

static int seen[4];
// Number of calls that sent something, now and when a child was last isolated only in part.
static volatile unsigned sends, sends_then;

static long raw(long number, long a, long b, long c, long d)
{
    register long r10 __asm__("r10") = d;
    long result;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10) : "rcx", "r11", "memory");
    return result;
}

__asm__(".text\nrestorer:\nmov $15, %rax\nsyscall\n");
extern void restorer(void);

// Looks at the mappings of channels and clients, without the library, and exits with what they are.
static void inspect_child(void)
{
    static char maps[1 << 20];
    int at = 0, got, shared = 0, own = 0;
    long fd = raw(SYS_open, (long)"/proc/self/maps", O_RDONLY, 0, 0);
    while ((got = raw(SYS_read, fd, (long)maps + at, sizeof maps - 1 - at, 0)) > 0) at += got;
    maps[at] = 0;
    for (char *line = maps, *end; (end = strchr(line, '\n')); line = end + 1) {
        *end = 0;
        if (!strstr(line, "memfd:ginnel-c")) continue;
        shared += strstr(line, " rw-s ") != 0, own += strstr(line, " rw-p ") != 0;
    }
    raw(SYS_exit_group, own && shared ? PARTLY : own ? ISOLATED : OUTSIDE, 0, 0, 0);
}

static void handler(int signal)
{
    (void)signal;
    int error = errno, status;
    pid_t child = fork();
    if (child == 0) inspect_child();
    while (waitpid(child, &status, 0) < 0 && errno == EINTR);
    int found = WIFEXITED(status) ? WEXITSTATUS(status) : 0;
    // The call that exchanges the channels after a restart counts once: its child cannot use the new ones.
    if (found != PARTLY || sends != sends_then) seen[found & 3]++;
    if (found == PARTLY) sends_then = sends;
    errno = error;
}

static void install(void)
{
    struct { void (*handler)(int); unsigned long flags; void (*restorer)(void); unsigned long mask; } action =
        {handler, 0x04000000ul | SA_RESTART, restorer, 0};
    if (raw(SYS_rt_sigaction, SIGALRM, (long)&action, 0, 8)) exit(3);
}

int main(int count, char **arguments)
{
    if (count < 2) return 2;
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(7300), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(listener, (void *)&at, sizeof at) || listen(listener, 8)) return 1;
    install();
    struct itimerval every = {{0, 2000}, {0, 2000}};
    setitimer(ITIMER_REAL, &every, 0);
    fclose(fopen(arguments[1], "w"));
    while (access(arguments[1], F_OK) == 0) {
        int from = socket(AF_INET, SOCK_STREAM, 0), to = -1;
        char bytes[4096] = {0};
        if (connect(from, (void *)&at, sizeof at) == 0 && (to = accept(listener, 0, 0)) >= 0) {
            // Until the connection is reset.
            for (; access(arguments[1], F_OK) == 0 && send(from, bytes, sizeof bytes, MSG_NOSIGNAL) > 0; sends++)
                for (int i = 0; i < 50; i++) recv(to, bytes, sizeof bytes, MSG_DONTWAIT);
        }
        close(from), close(to);
    }
    every.it_value.tv_usec = every.it_interval.tv_usec = 0;
    setitimer(ITIMER_REAL, &every, 0);
    printf("isolated: %s, partly: %d\n", seen[ISOLATED] > 5 ? "many" : "few", seen[PARTLY]);
    return 0;
}
