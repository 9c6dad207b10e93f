/* Servers with many processes, and a client in the same program.
 *
 * many_processes forking N   forks for each of N connections; every child answers when all are connected
 * many_processes workers N   forks N workers that accept from one listener; each answers one connection
 * many_processes listeners N opens N listeners, and connects to the last one
 */
#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(condition) \
  do { \
    if (!(condition)) { fprintf(stderr, "line %d: %s: %s\n", __LINE__, #condition, strerror(errno)); exit(1); } \
  } while (0)

static struct sockaddr_in address(int port) {
  struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(port)};
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return at;
}

static int listener(int port) {
  int fd = socket(AF_INET, SOCK_STREAM, 0);
  struct sockaddr_in at = address(port);
  int on = 1;
  CHECK(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0);
  CHECK(fd >= 0 && bind(fd, (void *)&at, sizeof at) == 0);
  if (listen(fd, 4096) != 0) {
    printf("listener of port %d: %s\n", port, strerror(errno));
    exit(0);
  }
  return fd;
}

static int connected(int port) {
  int fd = socket(AF_INET, SOCK_STREAM, 0);
  struct sockaddr_in at = address(port);
  CHECK(fd >= 0 && connect(fd, (void *)&at, sizeof at) == 0);
  return fd;
}

/* Connects `count` times, prints how many connections get their answer and their end, and exits. */
static void run_client(int port, int count) {
  int *fds = calloc(count, sizeof *fds);
  for (int i = 0; i < count; i++) fds[i] = connected(port);
  int answers = 0;
  for (int i = 0; i < count; i++) {
    char text[8];
    ssize_t got = recv(fds[i], text, sizeof text, MSG_WAITALL);
    if (got == 6 && memcmp(text, "answer", 6) == 0) answers++;
    close(fds[i]);
  }
  printf("%d answers\n", answers);
  exit(0);
}

int main(int argc, char **argv) {
  CHECK(argc == 3);
  int count = atoi(argv[2]);
  struct rlimit limit;
  CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
  limit.rlim_cur = limit.rlim_max;
  CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
  alarm(50);
  if (strcmp(argv[1], "listeners") == 0) {
    for (int i = 0; i < count; i++) listener(10000 + i);
    connected(10000 + count - 1);
    printf("%d listeners\n", count);
    return 0;
  }
  int forking = strcmp(argv[1], "forking") == 0;
  int port = forking ? 7100 : 7101;
  int server = listener(port);
  int all_connected[2];
  CHECK(pipe(all_connected) == 0);
  pid_t client = fork();
  CHECK(client >= 0);
  if (client == 0) {
    close(server);
    close(all_connected[1]);
    run_client(port, count);
  }
  for (int i = 0; i < count; i++) {
    int fd = forking ? accept(server, NULL, NULL) : -1;
    CHECK(!forking || fd >= 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
      char byte;
      close(all_connected[1]);
      if (!forking) fd = accept(server, NULL, NULL);
      close(server);
      if (forking) CHECK(read(all_connected[0], &byte, 1) == 0);
      _exit(fd >= 0 && send(fd, "answer", 6, 0) == 6 ? 0 : 1);
    }
    if (forking) close(fd);
  }
  close(all_connected[1]);
  int failed = 0, status;
  while (wait(&status) > 0) failed += status != 0;
  printf("%d failed\n", failed);
  return 0;
}
