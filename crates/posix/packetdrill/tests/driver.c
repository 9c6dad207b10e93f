/* Acts as the network and as the program for libpacketdrill_ginnel.so, and runs one case.
   Usage: driver LIBRARY CASE [FLAGS]. */
#include "driver.h"

static struct peer PEER = {.port = 40000, .local_port = 8080, .next = 1000};

static int listener(int v6, int port)
{
	socklen_t len;
	struct sockaddr_storage own = socket_address(v6, LOCAL[v6], port, &len);
	int fd = i.socket(U, v6 ? AF_INET6 : AF_INET, SOCK_STREAM, IPPROTO_TCP), one = 1;
	CHECK(fd >= 0);
	CHECK(fcntl(fd, F_GETFD) >= 0); /* a descriptor of the kernel */
	CHECK(i.setsockopt(U, fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) == 0);
	CHECK(i.bind(U, fd, (void *)&own, len) == 0);
	CHECK(i.listen(U, fd, 5) == 0);
	return fd;
}

/* Opens a connection from the remote end, and returns the accepted descriptor. */
static int accept_peer(int listener, struct peer *p)
{
	struct sockaddr_storage from;
	socklen_t len = sizeof from;
	send_segment(p, SYN, "");
	expect_segment(p, SYN | ACK, "");
	send_segment(p, ACK, "");
	int fd = i.accept(U, listener, (void *)&from, &len);
	CHECK(fd >= 0);
	socklen_t expected_len;
	struct sockaddr_storage expected = socket_address(p->v6, REMOTE[p->v6], p->port, &expected_len);
	CHECK(len == expected_len && memcmp(&from, &expected, len) == 0);
	return fd;
}

static int established(struct peer *p)
{
	int l = listener(p->v6, p->local_port);
	int fd = accept_peer(l, p);
	CHECK(i.close(U, l) == 0);
	return fd;
}

static long long machine_now(void)
{
	struct timeval t;
	gettimeofday(&t, NULL);
	return t.tv_sec * 1000000ll + t.tv_usec;
}

/* ---- cases ---- */

/* The remote end opens the connection, both ends send, and the remote end closes first. */
static void exchange_and_close(int v6)
{
	struct peer p = PEER;
	char got[100];
	p.v6 = v6;
	int fd = established(&p);
	send_segment(&p, ACK | PSH, "hello");
	CHECK(i.read(U, fd, got, sizeof got) == 5 && memcmp(got, "hello", 5) == 0);
	expect_segment(&p, ACK, "");
	CHECK(i.write(U, fd, "and back", 8) == 8);
	expect_segment(&p, ACK, "and back");
	send_segment(&p, ACK, "");
	send_segment(&p, FIN | ACK, "");
	expect_segment(&p, ACK, "");
	CHECK(i.read(U, fd, got, sizeof got) == 0);
	CHECK(i.close(U, fd) == 0);
	expect_segment(&p, FIN | ACK, "");
	send_segment(&p, ACK, "");
	FAILS(i.read(U, fd, got, 1), EBADF);
}

static void passive_open(void) { exchange_and_close(0); }
static void passive_open_v6(void) { exchange_and_close(1); }

/* A call that blocks on its own thread, while the main thread sends and receives packets. */
struct blocking_call {
	pthread_t thread;
	int fd, result, error, done;
	char got[100];
};

static void *connect_thread(void *argument)
{
	struct blocking_call *w = argument;
	socklen_t len;
	struct sockaddr_storage to = socket_address(0, REMOTE[0], 80, &len);
	w->result = i.connect(U, w->fd, (void *)&to, len);
	w->error = errno;
	__atomic_store_n(&w->done, 1, __ATOMIC_SEQ_CST);
	return NULL;
}

static void *read_thread(void *argument)
{
	struct blocking_call *w = argument;
	w->result = i.read(U, w->fd, w->got, sizeof w->got);
	w->error = errno;
	__atomic_store_n(&w->done, 1, __ATOMIC_SEQ_CST);
	return NULL;
}

static struct blocking_call *start_call(void *(*run)(void *), int fd)
{
	struct blocking_call *w = calloc(1, sizeof *w);
	w->fd = fd;
	CHECK(pthread_create(&w->thread, NULL, run, w) == 0);
	return w;
}

static int join_call(struct blocking_call *w)
{
	CHECK(pthread_join(w->thread, NULL) == 0);
	errno = w->error;
	return w->result;
}

static int is_done(struct blocking_call *w) { return __atomic_load_n(&w->done, __ATOMIC_SEQ_CST); }

static void active_open(void)
{
	struct peer p = {.port = 80, .next = 5000};
	int fd = i.socket(U, AF_INET, SOCK_STREAM, 0);
	struct blocking_call *w = start_call(connect_thread, fd);
	struct segment syn = expect_segment(&p, SYN, "");
	CHECK(has_option(&syn, 2) && has_option(&syn, 4) && has_option(&syn, 8) && has_option(&syn, 3));
	p.local_port = syn.from;
	CHECK(i.usleep(U, 30000) == 0);
	CHECK(!is_done(w)); /* connect blocks */
	send_segment(&p, SYN | ACK, "");
	expect_segment(&p, ACK, "");
	CHECK(join_call(w) == 0);
	w = start_call(read_thread, fd);
	CHECK(i.usleep(U, 30000) == 0);
	CHECK(!is_done(w));
	send_segment(&p, ACK | PSH, "late");
	expect_segment(&p, ACK, "");
	CHECK(join_call(w) == 4 && memcmp(w->got, "late", 4) == 0);
	/* The local end closes first. */
	CHECK(i.close(U, fd) == 0);
	expect_segment(&p, FIN | ACK, "");
	send_segment(&p, FIN | ACK, "");
	expect_segment(&p, ACK, "");
}

static void refused_connect(void)
{
	struct peer p = {.port = 80, .next = 0};
	int fd = i.socket(U, AF_INET, SOCK_STREAM, 0);
	struct blocking_call *w = start_call(connect_thread, fd);
	p.local_port = expect_segment(&p, SYN, "").from;
	send_segment(&p, RST | ACK, "");
	CHECK(join_call(w) == -1 && errno == ECONNREFUSED);
	/* A port without a listener. */
	struct peer q = {.port = 41000, .local_port = 99, .next = 77};
	send_segment(&q, SYN, "");
	expect_segment(&q, RST | ACK, "");
}

static void reset(void)
{
	struct peer p = PEER;
	char got;
	int fd = established(&p);
	send_segment(&p, RST, "");
	struct pollfd one = {.fd = fd, .events = POLLIN};
	CHECK(i.poll(U, &one, 1, 5000) == 1 && one.revents == (POLLIN | POLLERR | POLLHUP));
	FAILS(i.read(U, fd, &got, 1), ECONNRESET);
	CHECK(i.read(U, fd, &got, 1) == 0);
	FAILS(i.send(U, fd, "x", 1, MSG_NOSIGNAL), EPIPE);
	/* The local end resets the connection. */
	p = PEER;
	p.port++;
	fd = established(&p);
	struct linger linger = {1, 0};
	CHECK(i.setsockopt(U, fd, SOL_SOCKET, SO_LINGER, &linger, sizeof linger) == 0);
	CHECK(i.close(U, fd) == 0);
	expect_segment(&p, RST | ACK, "");
}

static void poll_and_epoll(void)
{
	struct peer p = PEER;
	char got[10];
	int fd = established(&p), set = i.epoll_create(U, 1);
	CHECK(set >= 0 && fcntl(set, F_GETFD) >= 0);
	FAILS(i.epoll_create(U, 0), EINVAL);
	struct epoll_event event = {.events = EPOLLIN | EPOLLET, .data.u64 = 42}, came[4];
	CHECK(i.epoll_ctl(U, set, EPOLL_CTL_ADD, fd, &event) == 0);
	FAILS(i.epoll_ctl(U, set, EPOLL_CTL_ADD, fd, &event), EEXIST);
	struct pollfd one = {.fd = fd, .events = POLLIN | POLLOUT};
	CHECK(i.poll(U, &one, 1, 0) == 1 && one.revents == POLLOUT);
	one.events = POLLIN;
	long long begun = now();
	CHECK(i.poll(U, &one, 1, 50) == 0 && one.revents == 0);
	CHECK(now() - begun >= 50000 && now() - begun < 2000000);
	begun = now();
	CHECK(i.epoll_wait(U, set, came, 4, 50) == 0);
	CHECK(now() - begun >= 50000 && now() - begun < 2000000);
	CHECK(i.epoll_wait(U, set, NULL, 4, 0) == 0);
	FAILS(i.epoll_wait(U, set, came, 0, 0), EINVAL);
	FAILS(i.epoll_wait(U, set, came, -1, 0), EINVAL);
	send_segment(&p, ACK | PSH, "x");
	/* The event stays in the set. */
	FAILS(i.epoll_wait(U, set, NULL, 4, 5000), EFAULT);
	CHECK(i.epoll_wait(U, set, came, 4, 5000) == 1);
	CHECK(came[0].events == EPOLLIN && came[0].data.u64 == 42);
	CHECK(i.epoll_wait(U, set, came, 4, 0) == 0);
	CHECK(i.poll(U, &one, 1, 0) == 1 && one.revents == POLLIN);
	CHECK(i.read(U, fd, got, 10) == 1);
	CHECK(i.epoll_ctl(U, set, EPOLL_CTL_DEL, fd, NULL) == 0);
	CHECK(i.close(U, set) == 0 && i.close(U, fd) == 0);
}

static void nonblocking_calls(void)
{
	struct peer p = PEER, q = {.port = 80, .next = 9000};
	char got[10];
	int value;
	int l = listener(0, p.local_port);
	CHECK(i.fcntl(U, l, F_GETFL) == O_RDWR);
	CHECK(i.fcntl(U, l, F_SETFL, O_RDWR | O_NONBLOCK) == 0);
	CHECK(i.fcntl(U, l, F_GETFL) == (O_RDWR | O_NONBLOCK));
	FAILS(i.accept(U, l, NULL, NULL), EAGAIN);
	int fd = accept_peer(l, &p);
	CHECK(i.fcntl(U, fd, F_GETFL) == O_RDWR);
	FAILS(i.recv(U, fd, got, 10, MSG_DONTWAIT), EAGAIN);
	int on = 1;
	CHECK(i.ioctl(U, fd, FIONBIO, &on) == 0);
	FAILS(i.read(U, fd, got, 10), EAGAIN);
	/* A null buffer is an error only when there are bytes to copy. */
	FAILS(i.read(U, fd, NULL, 10), EAGAIN);
	send_segment(&p, ACK | PSH, "abc");
	expect_segment(&p, ACK, "");
	CHECK(i.ioctl(U, fd, FIONREAD, &value) == 0 && value == 3);
	CHECK(i.recv(U, fd, got, 10, MSG_PEEK) == 3);
	FAILS(i.read(U, fd, NULL, 10), EFAULT);
	FAILS(i.recvfrom(U, fd, NULL, 10, 0, NULL, NULL), EFAULT);
	/* A duplicate refers to the same socket. */
	int copy = i.fcntl(U, fd, F_DUPFD, 100);
	CHECK(copy >= 100 && i.close(U, fd) == 0);
	CHECK(i.read(U, copy, got, 10) == 3);
	CHECK(i.close(U, copy) == 0);
	int c = i.socket(U, AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
	socklen_t len;
	struct sockaddr_storage to = socket_address(0, REMOTE[0], 80, &len);
	FAILS(i.connect(U, c, (void *)&to, len), EINPROGRESS);
	expect_segment(&p, FIN | ACK, "");
	q.local_port = expect_segment(&q, SYN, "").from;
	FAILS(i.connect(U, c, (void *)&to, len), EALREADY);
	send_segment(&q, SYN | ACK, "");
	expect_segment(&q, ACK, "");
	struct pollfd one = {.fd = c, .events = POLLOUT};
	CHECK(i.poll(U, &one, 1, 5000) == 1 && one.revents == POLLOUT);
	len = sizeof value;
	CHECK(i.getsockopt(U, c, SOL_SOCKET, SO_ERROR, &value, &len) == 0 && value == 0 && len == 4);
	FAILS(i.socket(U, AF_UNIX, SOCK_STREAM, 0), EAFNOSUPPORT);
}

static void message_calls(void)
{
	struct peer p = PEER;
	char a[3], b[10];
	int fd = established(&p), one = 1;
	CHECK(i.setsockopt(U, fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one) == 0);
	struct iovec out[2] = {{"ab", 2}, {"cde", 3}}, in[2] = {{a, sizeof a}, {b, sizeof b}};
	CHECK(i.writev(U, fd, out, 2) == 5);
	expect_segment(&p, ACK, "abcde");
	struct msghdr message = {.msg_iov = out, .msg_iovlen = 2};
	CHECK(i.sendmsg(U, fd, &message, 0) == 5);
	expect_segment(&p, ACK, "abcde");
	CHECK(i.sendto(U, fd, "f", 1, 0, NULL, 0) == 1);
	expect_segment(&p, ACK, "f");
	send_segment(&p, ACK | PSH, "12345");
	expect_segment(&p, ACK, "");
	CHECK(i.readv(U, fd, in, 2) == 5 && memcmp(a, "123", 3) == 0 && memcmp(b, "45", 2) == 0);
	send_segment(&p, ACK | PSH, "6789");
	expect_segment(&p, ACK, "");
	struct msghdr got = {.msg_iov = in, .msg_iovlen = 2, .msg_name = b, .msg_namelen = 10, .msg_flags = -1};
	CHECK(i.recvmsg(U, fd, &got, 0) == 4 && got.msg_flags == 0 && got.msg_namelen == 0);
	send_segment(&p, ACK | PSH, "z");
	expect_segment(&p, ACK, "");
	socklen_t len = 10;
	struct sockaddr_storage from;
	CHECK(i.recvfrom(U, fd, b, 10, 0, (void *)&from, &len) == 1 && b[0] == 'z' && len == 0);
	/* Without a buffer for the address, its length is not written. */
	send_segment(&p, ACK | PSH, "yx");
	expect_segment(&p, ACK, "");
	len = 10;
	CHECK(i.recvfrom(U, fd, b, 1, 0, NULL, &len) == 1 && b[0] == 'y' && len == 10);
	struct msghdr unnamed = {.msg_iov = in, .msg_iovlen = 2, .msg_namelen = 10};
	CHECK(i.recvmsg(U, fd, &unnamed, 0) == 1 && a[0] == 'x' && unnamed.msg_namelen == 10);
	struct tcp_info info;
	len = sizeof info;
	CHECK(i.getsockopt(U, fd, IPPROTO_TCP, TCP_INFO, &info, &len) == 0);
	CHECK(info.tcpi_state == TCP_ESTABLISHED && info.tcpi_unacked == 0);
	CHECK(i.shutdown(U, fd, SHUT_WR) == 0);
	expect_segment(&p, FIN | ACK, "");
	FAILS(i.send(U, fd, "x", 1, MSG_NOSIGNAL), EPIPE);
	CHECK(i.close(U, fd) == 0);
}

static void splice_calls(void)
{
	struct peer p = PEER;
	int fd = established(&p), ends[2];
	char got[10];
	CHECK(i.pipe(U, ends) == 0);
	CHECK(i.write(U, ends[1], "through", 7) == 7);
	CHECK(i.splice(U, ends[0], NULL, fd, NULL, 100, 0) == 7);
	expect_segment(&p, ACK, "through");
	send_segment(&p, ACK | PSH, "back");
	expect_segment(&p, ACK, "");
	CHECK(i.splice(U, fd, NULL, ends[1], NULL, 100, 0) == 4);
	CHECK(i.read(U, ends[0], got, 10) == 4 && memcmp(got, "back", 4) == 0);
	int on = 1;
	CHECK(i.ioctl(U, fd, FIONBIO, &on) == 0);
	FAILS(i.splice(U, fd, NULL, ends[1], NULL, 100, 0), EAGAIN);
	struct pollfd two[2] = {{.fd = ends[0], .events = POLLIN}, {.fd = fd, .events = POLLOUT}};
	CHECK(i.poll(U, two, 2, 0) == 1 && two[0].revents == 0 && two[1].revents == POLLOUT);
	CHECK(i.close(U, ends[0]) == 0 && i.close(U, ends[1]) == 0 && i.close(U, fd) == 0);
}

static void timestamps(void)
{
	struct peer p = PEER;
	long long last = 0;
	int early = 0;
	CHECK(llabs(now() - machine_now()) < 100000);
	int fd = established(&p), one = 1;
	CHECK(i.setsockopt(U, fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one) == 0);
	for (int round = 0; round < 20; round++) {
		long long before = now();
		CHECK(i.write(U, fd, "tick", 4) == 4);
		CHECK(i.usleep(U, 20000) == 0);
		long long after = now();
		CHECK(after - before >= 20000);
		struct segment s = expect_segment(&p, ACK, "tick");
		CHECK(s.time >= before);
		early += s.time < after;
		CHECK(s.time > last);
		last = s.time;
		send_segment(&p, ACK, "");
	}
	/* The time of a packet is the time of its transmission, not of the request for it. A busy machine may
	   delay some packets. */
	CHECK(early >= 15);
}

/* One call transfers more than a channel holds, up to the size of the socket buffers. */
static void large_buffers(void)
{
	enum { MANY = 400000, SOME = 120000 };
	static char data[MANY];
	struct peer p = PEER;
	int fd = established(&p), size = 200000;
	CHECK(i.setsockopt(U, fd, SOL_SOCKET, SO_SNDBUF, &size, sizeof size) == 0);
	CHECK(i.write(U, fd, data, MANY) == MANY);
	for (int count = 0; count < 10; count++)
		CHECK(next_segment().len == 1460);
	CHECK(i.fcntl(U, fd, F_SETFL, O_RDWR | O_NONBLOCK) == 0);
	int more = i.write(U, fd, data, MANY);
	CHECK(more == -1 ? errno == EAGAIN : more < MANY);
	/* The receive buffer takes what the default window allows before the first read: 128 KiB. */
	for (int came = 0; came < SOME; came += 1000) {
		struct segment s = {.from = p.port, .to = p.local_port, .seq = p.next, .ack = p.acked, .flags = ACK, .window = 65535, .len = 1000};
		inject(&s);
		p.next += 1000;
	}
	CHECK(i.read(U, fd, data, MANY) == SOME);
	FAILS(i.read(U, fd, data, MANY), EAGAIN);
}

/* A write ends when the send buffer is full, except that the last buffer of whole segments may exceed the
   size. The socket is writable again when a third is free. */
static void send_buffer(void)
{
	enum { MANY = 400000, FIRST = 87040, BUFFER = 32767 / 1460 * 1460 };
	static char data[MANY];
	struct peer p = PEER;
	int fd = established(&p), size;
	struct pollfd one = {.fd = fd, .events = POLLOUT};
	CHECK(i.fcntl(U, fd, F_SETFL, O_RDWR | O_NONBLOCK) == 0);
	CHECK(i.poll(U, &one, 1, 0) == 1 && one.revents == POLLOUT);
	/* The size is at least twice ten segments, counted like the kernel counts them. */
	int wrote = i.write(U, fd, data, MANY);
	CHECK(wrote >= FIRST && wrote < FIRST + BUFFER);
	CHECK(i.poll(U, &one, 1, 0) == 0);
	FAILS(i.write(U, fd, data, MANY), EAGAIN);
	socklen_t len = sizeof size;
	CHECK(i.getsockopt(U, fd, SOL_SOCKET, SO_SNDBUF, &size, &len) == 0 && size == FIRST);
	for (int count = 0; count < 10; count++)
		CHECK(next_segment().len == 1460);
	/* SO_SNDBUF sets the size to twice the value. */
	struct peer q = PEER;
	q.port++, q.local_port++;
	int other = established(&q), set = 10000;
	CHECK(i.setsockopt(U, other, SOL_SOCKET, SO_SNDBUF, &set, sizeof set) == 0);
	CHECK(i.fcntl(U, other, F_SETFL, O_RDWR | O_NONBLOCK) == 0);
	wrote = i.write(U, other, data, MANY);
	CHECK(wrote >= 20000 && wrote < 20000 + BUFFER + 10 * 1460);
	FAILS(i.write(U, other, data, MANY), EAGAIN);
}

static void *write_thread(void *argument)
{
	struct blocking_call *w = argument;
	w->result = i.write(U, w->fd, w->got, sizeof w->got);
	w->error = errno;
	__atomic_store_n(&w->done, 1, __ATOMIC_SEQ_CST);
	return NULL;
}

/* A write that waits for space continues when a third of the send buffer is free. */
static void blocked_writer(void)
{
	enum { MANY = 400000, SIZE = 40000 };
	static char data[MANY];
	struct peer p = PEER;
	int fd = established(&p), set = SIZE / 2;
	CHECK(i.setsockopt(U, fd, SOL_SOCKET, SO_SNDBUF, &set, sizeof set) == 0);
	CHECK(i.fcntl(U, fd, F_SETFL, O_RDWR | O_NONBLOCK) == 0);
	int unacked = i.write(U, fd, data, MANY);
	CHECK(unacked >= SIZE && unacked < MANY);
	CHECK(i.fcntl(U, fd, F_SETFL, O_RDWR) == 0);
	struct blocking_call *w = start_call(write_thread, fd);
	while (unacked > SIZE * 2 / 3) {
		CHECK(i.usleep(U, 5000) == 0);
		CHECK(!is_done(w));
		int len = next_segment().len;
		p.acked += len;
		unacked -= len;
		send_segment(&p, ACK, "");
	}
	CHECK(join_call(w) == sizeof w->got);
}

static int open_descriptors(void)
{
	int count = 0;
	for (int fd = 0; fd < 4096; fd++)
		count += fcntl(fd, F_GETFD) >= 0;
	return count;
}

static void repeated_init(void)
{
	struct interface other;
	i.free(U);
	int before = open_descriptors();
	for (int round = 0; round < 20; round++) {
		CHECK(init(NULL, &i) == 0);
		passive_open();
		/* `free` closes descriptors that are still open. */
		listener(0, 9999);
		i.free(U);
		CHECK(open_descriptors() == before);
	}
	/* Two stacks of one process are independent. */
	CHECK(init(NULL, &other) == 0 && init(NULL, &i) == 0);
	CHECK(other.userdata != i.userdata);
	int a = listener(0, 8080);
	struct interface first = i;
	i = other;
	int b = listener(0, 8080);
	CHECK(a != b);
	CHECK(i.close(U, b) == 0);
	passive_open();
	i.free(U);
	i = first;
	CHECK(i.close(U, a) == 0);
	passive_open();
}

/* The flags of this case are invalid. */
static void invalid_flags(void)
{
	struct timeval t;
	char packet[40] = {0x45};
	size_t len = sizeof packet;
	long long time;
	CHECK(U == NULL);
	FAILS(i.socket(U, AF_INET, SOCK_STREAM, 0), ENODEV);
	FAILS(i.gettimeofday(U, &t, NULL), ENODEV);
	FAILS(i.netdev_send(U, packet, sizeof packet), ENODEV);
	FAILS(i.netdev_receive(U, packet, &len, &time), ENODEV);
	FAILS(i.read(U, 3, packet, 1), ENODEV);
	FAILS(i.usleep(U, 1), ENODEV);
}

/* SACK is off by a file in the folder that the flags of this case name, timestamps are off by a flag. */
static void sysctl_and_mtu_flags(void)
{
	struct peer p = {.port = 80};
	struct blocking_call *w = start_call(connect_thread, i.socket(U, AF_INET, SOCK_STREAM, 0));
	struct segment syn = expect_segment(&p, SYN, "");
	CHECK(has_option(&syn, 2) && !has_option(&syn, 4) && !has_option(&syn, 8));
	CHECK(get16(syn.options + 2) == 960); /* the MTU is 1000 bytes */
	p.local_port = syn.from;
	send_segment(&p, RST | ACK, "");
	CHECK(join_call(w) == -1);
}

static void malformed_packets(void)
{
	static char packet[70000] = {0x45};
	size_t len = 1;
	long long time;
	FAILS(i.netdev_send(U, packet, 10), EINVAL);
	FAILS(i.netdev_send(U, packet, 70000), EMSGSIZE);
	FAILS(i.netdev_send(U, NULL, 40), EFAULT);
	packet[0] = 0;
	FAILS(i.netdev_send(U, packet, 40), EINVAL);
	FAILS(i.netdev_receive(U, packet, NULL, &time), EFAULT);
	/* A buffer that is too small loses the packet, and the call fails. */
	struct peer q = {.port = 41000, .local_port = 99, .next = 77};
	send_segment(&q, SYN, "");
	FAILS(i.netdev_receive(U, packet, &len, &time), EMSGSIZE);
	CHECK(len == 0);
}

/* Datagrams in both directions, with their addresses. */
static void datagrams(void)
{
	socklen_t len;
	struct sockaddr_storage own = socket_address(0, LOCAL[0], 8080, &len), from, to = socket_address(0, REMOTE[0], 40000, &len);
	int fd = i.socket(U, AF_INET, SOCK_DGRAM, 0);
	uint8_t packet[100] = {0x45, 0, 0, 33, 0, 0, 0, 0, 64, 17}, *udp = packet + 20;
	char got[10];
	long long time;
	size_t count = sizeof packet;
	CHECK(fd >= 0 && i.bind(U, fd, (void *)&own, len) == 0);
	CHECK(inet_pton(AF_INET, REMOTE[0], packet + 12) == 1 && inet_pton(AF_INET, LOCAL[0], packet + 16) == 1);
	put16(packet + 10, folded(sum(packet, 20, 0)));
	put16(udp, 40000);
	put16(udp + 2, 8080);
	put16(udp + 4, 13);
	memcpy(udp + 8, "hello", 5);
	put16(udp + 6, folded(sum(udp, 13, sum(packet + 12, 8, 17 + 13))));
	CHECK(i.netdev_send(U, packet, 33) == 0);
	len = sizeof from;
	CHECK(i.recvfrom(U, fd, got, sizeof got, MSG_DONTWAIT, (void *)&from, &len) == 5);
	CHECK(memcmp(got, "hello", 5) == 0 && len == sizeof(struct sockaddr_in) && memcmp(&from, &to, len) == 0);
	FAILS(i.recv(U, fd, got, sizeof got, MSG_DONTWAIT), EAGAIN);
	struct iovec part = {"back", 4};
	struct msghdr message = {.msg_name = &to, .msg_namelen = len, .msg_iov = &part, .msg_iovlen = 1};
	CHECK(i.sendto(U, fd, "back", 4, 0, (void *)&to, len) == 4 && i.sendmsg(U, fd, &message, 0) == 4);
	for (int n = 0; n < 2; n++) {
		count = sizeof packet;
		CHECK(i.netdev_receive(U, packet, &count, &time) == 0 && count == 32 && packet[9] == 17);
		CHECK(get16(udp) == 8080 && get16(udp + 2) == 40000 && memcmp(udp + 8, "back", 4) == 0);
		CHECK(folded(sum(udp, 12, sum(packet + 12, 8, 17 + 12))) == 0);
	}
	CHECK(i.close(U, fd) == 0);
}

struct {
	const char *name;
	void (*run)(void);
} CASES[] = {
	{"passive_open", passive_open}, {"passive_open_v6", passive_open_v6}, {"active_open", active_open}, {"refused_connect", refused_connect},
	{"reset", reset}, {"poll_and_epoll", poll_and_epoll}, {"nonblocking_calls", nonblocking_calls},
	{"message_calls", message_calls}, {"splice_calls", splice_calls}, {"timestamps", timestamps}, {"large_buffers", large_buffers}, {"send_buffer", send_buffer}, {"blocked_writer", blocked_writer}, {"repeated_init", repeated_init},
	{"invalid_flags", invalid_flags}, {"sysctl_and_mtu_flags", sysctl_and_mtu_flags}, {"malformed_packets", malformed_packets}, {"datagrams", datagrams},
};

int main(int argc, char **argv)
{
	CHECK(argc == 3 || argc == 4);
	void *library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE | RTLD_DEEPBIND);
	if (!library) {
		fprintf(stderr, "%s\n", dlerror());
		return 1;
	}
	init = (init_fn)dlsym(library, "packetdrill_interface_init");
	CHECK(init);
	for (unsigned n = 0; n < sizeof CASES / sizeof *CASES; n++) {
		if (strcmp(CASES[n].name, argv[2]) != 0)
			continue;
		int wrong = CASES[n].run == invalid_flags;
		CHECK(init(argv[3], &i) == (wrong ? -1 : 0));
		CASES[n].run();
		i.free(U);
		return 0;
	}
	fprintf(stderr, "no case %s\n", argv[2]);
	return 1;
}
