/* Servers with many processes, and a client in the same program.
 *
 * many_processes forking N   forks for each of N connections; every child answers when all are connected
 * many_processes workers N   forks N workers that accept from one listener; each answers one connection
 * many_processes listeners N opens N listeners, and connects to the last one
 * many_processes stream N    forks N writers and N readers of one connection, and stops each now and then
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
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

/* What all processes of a stream have written and read together: bytes, and the sum of their values. */
struct totals {
  _Atomic uint64_t written, written_sum, read, read_sum;
  _Atomic int is_over;
};

static void add_up(_Atomic uint64_t *bytes, _Atomic uint64_t *sum, const unsigned char *data, size_t count) {
  uint64_t values = 0;
  for (size_t i = 0; i < count; i++) values += data[i];
  *bytes += count;
  *sum += values;
}

/* Writes or reads until the test or the stream is over; with `edges` without blocking, after a wait for one. */
static void transfer(int fd, struct totals *totals, int writes, int edges, int number) {
  unsigned char data[20000];
  for (size_t i = 0; i < sizeof data; i++) data[i] = i * (number + 3) % 251;
  int epoll = epoll_create1(0);
  struct epoll_event event = {.events = EPOLLET | (writes ? EPOLLOUT : EPOLLIN)};
  CHECK(epoll >= 0 && epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0);
  int flags = edges ? MSG_DONTWAIT : 0;
  while (!writes || !totals->is_over) {
    ssize_t done = writes ? send(fd, data, sizeof data, flags) : recv(fd, data, sizeof data, flags);
    if (done < 0 && errno == EAGAIN && edges) {
      CHECK(epoll_wait(epoll, &event, 1, writes ? 100 : -1) >= 0 || errno == EINTR);
      continue;
    }
    CHECK(done >= 0);
    if (done == 0) break;
    if (writes)
      add_up(&totals->written, &totals->written_sum, data, done);
    else
      add_up(&totals->read, &totals->read_sum, data, done);
  }
  _exit(0);
}

static void share_stream(int count) {
  int server = listener(7102), out = connected(7102), in = accept(server, NULL, NULL);
  int shared = MAP_SHARED | MAP_ANONYMOUS;
  struct totals *totals = mmap(NULL, sizeof *totals, PROT_READ | PROT_WRITE, shared, -1, 0);
  CHECK(in >= 0 && totals != MAP_FAILED);
  pid_t children[2 * count];
  for (int i = 0; i < 2 * count; i++) {
    children[i] = fork();
    CHECK(children[i] >= 0);
    if (children[i] == 0) {
      int writes = i < count;
      close(writes ? in : out);
      transfer(writes ? out : in, totals, writes, i % 2, i);
    }
  }
  close(in);
  for (int round = 0; round < 2; round++)
    for (int i = 0; i < 2 * count; i++) {
      CHECK(kill(children[i], SIGSTOP) == 0);
      usleep(50000);
      CHECK(kill(children[i], SIGCONT) == 0);
      usleep(1000);
    }
  totals->is_over = 1;
  int failed = 0, status;
  for (int i = 0; i < 2 * count; i++) {
    if (i == count) CHECK(shutdown(out, SHUT_WR) == 0);
    CHECK(waitpid(children[i], &status, 0) == children[i]);
    failed += status != 0;
  }
  printf("%d failed\n", failed);
  if (totals->written == totals->read && totals->written_sum == totals->read_sum && totals->written > 1000000)
    printf("all bytes once\n");
  else
    printf("%lu bytes written, %lu read, %ld more in sum\n", totals->written, totals->read,
           (long)(totals->read_sum - totals->written_sum));
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
  if (strcmp(argv[1], "stream") == 0) {
    share_stream(count);
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
