/* Plays the network and the program for libpacketdrill_ginnel.so: one case after the other, for what packetdrill could do.
   Usage: driver LIBRARY CASE [FLAGS]. */
#include "driver.h"

static struct peer PEER = {.port = 40000, .local_port = 8080, .next = 1000};

static int listener(int v6, int port)
{
	socklen_t len;
	struct sockaddr_storage own = name(v6, LOCAL[v6], port, &len);
	int fd = i.socket(U, v6 ? AF_INET6 : AF_INET, SOCK_STREAM, IPPROTO_TCP), one = 1;
	CHECK(fd >= 0);
	CHECK(fcntl(fd, F_GETFD) >= 0); /* a real descriptor */
	CHECK(i.setsockopt(U, fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) == 0);
	CHECK(i.bind(U, fd, (void *)&own, len) == 0);
	CHECK(i.listen(U, fd, 5) == 0);
	return fd;
}

/* A connection that the remote end opened. */
static int accepted(int listener, struct peer *p)
{
	struct sockaddr_storage from;
	socklen_t len = sizeof from;
	answer(p, SYN, "");
	expect(p, SYN | ACK, "");
	answer(p, ACK, "");
	int fd = i.accept(U, listener, (void *)&from, &len);
	CHECK(fd >= 0);
	socklen_t expected_len;
	struct sockaddr_storage expected = name(p->v6, REMOTE[p->v6], p->port, &expected_len);
	CHECK(len == expected_len && memcmp(&from, &expected, len) == 0);
	return fd;
}

static int established(struct peer *p)
{
	int l = listener(p->v6, p->local_port);
	int fd = accepted(l, p);
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

/* The remote end opens, both send, the remote end ends first. */
static void both_ways(int v6)
{
	struct peer p = PEER;
	char got[100];
	p.v6 = v6;
	int fd = established(&p);
	answer(&p, ACK | PSH, "hello");
	CHECK(i.read(U, fd, got, sizeof got) == 5 && memcmp(got, "hello", 5) == 0);
	expect(&p, ACK, "");
	CHECK(i.write(U, fd, "and back", 8) == 8);
	expect(&p, ACK, "and back");
	answer(&p, ACK, "");
	answer(&p, FIN | ACK, "");
	expect(&p, ACK, "");
	CHECK(i.read(U, fd, got, sizeof got) == 0);
	CHECK(i.close(U, fd) == 0);
	expect(&p, FIN | ACK, "");
	answer(&p, ACK, "");
	FAILS(i.read(U, fd, got, 1), EBADF);
}

static void passive(void) { both_ways(0); }
static void passive_v6(void) { both_ways(1); }

/* A call that waits on a thread of its own, while the network goes on. */
struct waiting {
	pthread_t thread;
	int fd, result, error, done;
	char got[100];
};

static void *connects(void *place)
{
	struct waiting *w = place;
	socklen_t len;
	struct sockaddr_storage to = name(0, REMOTE[0], 80, &len);
	w->result = i.connect(U, w->fd, (void *)&to, len);
	w->error = errno;
	__atomic_store_n(&w->done, 1, __ATOMIC_SEQ_CST);
	return NULL;
}

static void *reads(void *place)
{
	struct waiting *w = place;
	w->result = i.read(U, w->fd, w->got, sizeof w->got);
	w->error = errno;
	__atomic_store_n(&w->done, 1, __ATOMIC_SEQ_CST);
	return NULL;
}

static struct waiting *start(void *(*run)(void *), int fd)
{
	struct waiting *w = calloc(1, sizeof *w);
	w->fd = fd;
	CHECK(pthread_create(&w->thread, NULL, run, w) == 0);
	return w;
}

static int result(struct waiting *w)
{
	CHECK(pthread_join(w->thread, NULL) == 0);
	errno = w->error;
	return w->result;
}

static int is_done(struct waiting *w) { return __atomic_load_n(&w->done, __ATOMIC_SEQ_CST); }

static void active(void)
{
	struct peer p = {.port = 80, .next = 5000};
	int fd = i.socket(U, AF_INET, SOCK_STREAM, 0);
	struct waiting *w = start(connects, fd);
	struct segment syn = expect(&p, SYN, "");
	CHECK(has_option(&syn, 2) && has_option(&syn, 4) && has_option(&syn, 8) && has_option(&syn, 3));
	p.local_port = syn.from;
	CHECK(i.usleep(U, 30000) == 0);
	CHECK(!is_done(w)); /* it waits */
	answer(&p, SYN | ACK, "");
	expect(&p, ACK, "");
	CHECK(result(w) == 0);
	w = start(reads, fd);
	CHECK(i.usleep(U, 30000) == 0);
	CHECK(!is_done(w));
	answer(&p, ACK | PSH, "late");
	expect(&p, ACK, "");
	CHECK(result(w) == 4 && memcmp(w->got, "late", 4) == 0);
	/* This end ends first. */
	CHECK(i.close(U, fd) == 0);
	expect(&p, FIN | ACK, "");
	answer(&p, FIN | ACK, "");
	expect(&p, ACK, "");
}

static void refused(void)
{
	struct peer p = {.port = 80, .next = 0};
	int fd = i.socket(U, AF_INET, SOCK_STREAM, 0);
	struct waiting *w = start(connects, fd);
	p.local_port = expect(&p, SYN, "").from;
	answer(&p, RST | ACK, "");
	CHECK(result(w) == -1 && errno == ECONNREFUSED);
	/* Nobody listens here. */
	struct peer q = {.port = 41000, .local_port = 99, .next = 77};
	answer(&q, SYN, "");
	expect(&q, RST | ACK, "");
}

static void reset(void)
{
	struct peer p = PEER;
	char got;
	int fd = established(&p);
	answer(&p, RST, "");
	struct pollfd one = {.fd = fd, .events = POLLIN};
	CHECK(i.poll(U, &one, 1, 5000) == 1 && one.revents == (POLLIN | POLLERR | POLLHUP));
	FAILS(i.read(U, fd, &got, 1), ECONNRESET);
	CHECK(i.read(U, fd, &got, 1) == 0);
	FAILS(i.send(U, fd, "x", 1, MSG_NOSIGNAL), EPIPE);
	/* And the other way. */
	p = PEER;
	p.port++;
	fd = established(&p);
	struct linger linger = {1, 0};
	CHECK(i.setsockopt(U, fd, SOL_SOCKET, SO_LINGER, &linger, sizeof linger) == 0);
	CHECK(i.close(U, fd) == 0);
	expect(&p, RST | ACK, "");
}

static void waiting_for_readiness(void)
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
	answer(&p, ACK | PSH, "x");
	CHECK(i.epoll_wait(U, set, came, 4, 5000) == 1);
	CHECK(came[0].events == EPOLLIN && came[0].data.u64 == 42);
	CHECK(i.epoll_wait(U, set, came, 4, 0) == 0);
	CHECK(i.poll(U, &one, 1, 0) == 1 && one.revents == POLLIN);
	CHECK(i.read(U, fd, got, 10) == 1);
	CHECK(i.epoll_ctl(U, set, EPOLL_CTL_DEL, fd, NULL) == 0);
	CHECK(i.close(U, set) == 0 && i.close(U, fd) == 0);
}

static void without_waiting(void)
{
	struct peer p = PEER, q = {.port = 80, .next = 9000};
	char got[10];
	int value;
	int l = listener(0, p.local_port);
	CHECK(i.fcntl(U, l, F_GETFL) == O_RDWR);
	CHECK(i.fcntl(U, l, F_SETFL, O_RDWR | O_NONBLOCK) == 0);
	CHECK(i.fcntl(U, l, F_GETFL) == (O_RDWR | O_NONBLOCK));
	FAILS(i.accept(U, l, NULL, NULL), EAGAIN);
	int fd = accepted(l, &p);
	CHECK(i.fcntl(U, fd, F_GETFL) == O_RDWR);
	FAILS(i.recv(U, fd, got, 10, MSG_DONTWAIT), EAGAIN);
	int on = 1;
	CHECK(i.ioctl(U, fd, FIONBIO, &on) == 0);
	FAILS(i.read(U, fd, got, 10), EAGAIN);
	/* That there is no place is found out when something is to be put there. */
	FAILS(i.read(U, fd, NULL, 10), EAGAIN);
	answer(&p, ACK | PSH, "abc");
	expect(&p, ACK, "");
	CHECK(i.ioctl(U, fd, FIONREAD, &value) == 0 && value == 3);
	CHECK(i.recv(U, fd, got, 10, MSG_PEEK) == 3);
	FAILS(i.read(U, fd, NULL, 10), EFAULT);
	FAILS(i.recvfrom(U, fd, NULL, 10, 0, NULL, NULL), EFAULT);
	/* A copy is as good. */
	int copy = i.fcntl(U, fd, F_DUPFD, 100);
	CHECK(copy >= 100 && i.close(U, fd) == 0);
	CHECK(i.read(U, copy, got, 10) == 3);
	CHECK(i.close(U, copy) == 0);
	int c = i.socket(U, AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
	socklen_t len;
	struct sockaddr_storage to = name(0, REMOTE[0], 80, &len);
	FAILS(i.connect(U, c, (void *)&to, len), EINPROGRESS);
	expect(&p, FIN | ACK, "");
	q.local_port = expect(&q, SYN, "").from;
	FAILS(i.connect(U, c, (void *)&to, len), EALREADY);
	answer(&q, SYN | ACK, "");
	expect(&q, ACK, "");
	struct pollfd one = {.fd = c, .events = POLLOUT};
	CHECK(i.poll(U, &one, 1, 5000) == 1 && one.revents == POLLOUT);
	len = sizeof value;
	CHECK(i.getsockopt(U, c, SOL_SOCKET, SO_ERROR, &value, &len) == 0 && value == 0 && len == 4);
	FAILS(i.socket(U, AF_UNIX, SOCK_STREAM, 0), EAFNOSUPPORT);
}

static void messages(void)
{
	struct peer p = PEER;
	char a[3], b[10];
	int fd = established(&p), one = 1;
	CHECK(i.setsockopt(U, fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one) == 0);
	struct iovec out[2] = {{"ab", 2}, {"cde", 3}}, in[2] = {{a, sizeof a}, {b, sizeof b}};
	CHECK(i.writev(U, fd, out, 2) == 5);
	expect(&p, ACK, "abcde");
	struct msghdr message = {.msg_iov = out, .msg_iovlen = 2};
	CHECK(i.sendmsg(U, fd, &message, 0) == 5);
	expect(&p, ACK, "abcde");
	CHECK(i.sendto(U, fd, "f", 1, 0, NULL, 0) == 1);
	expect(&p, ACK, "f");
	answer(&p, ACK | PSH, "12345");
	expect(&p, ACK, "");
	CHECK(i.readv(U, fd, in, 2) == 5 && memcmp(a, "123", 3) == 0 && memcmp(b, "45", 2) == 0);
	answer(&p, ACK | PSH, "6789");
	expect(&p, ACK, "");
	struct msghdr got = {.msg_iov = in, .msg_iovlen = 2, .msg_name = b, .msg_namelen = 10, .msg_flags = -1};
	CHECK(i.recvmsg(U, fd, &got, 0) == 4 && got.msg_flags == 0 && got.msg_namelen == 0);
	answer(&p, ACK | PSH, "z");
	expect(&p, ACK, "");
	socklen_t len = 10;
	struct sockaddr_storage from;
	CHECK(i.recvfrom(U, fd, b, 10, 0, (void *)&from, &len) == 1 && b[0] == 'z' && len == 0);
	struct tcp_info info;
	len = sizeof info;
	CHECK(i.getsockopt(U, fd, IPPROTO_TCP, TCP_INFO, &info, &len) == 0);
	CHECK(info.tcpi_state == TCP_ESTABLISHED && info.tcpi_unacked == 0);
	CHECK(i.shutdown(U, fd, SHUT_WR) == 0);
	expect(&p, FIN | ACK, "");
	FAILS(i.send(U, fd, "x", 1, MSG_NOSIGNAL), EPIPE);
	CHECK(i.close(U, fd) == 0);
}

static void pipes(void)
{
	struct peer p = PEER;
	int fd = established(&p), ends[2];
	char got[10];
	CHECK(i.pipe(U, ends) == 0);
	CHECK(i.write(U, ends[1], "through", 7) == 7);
	CHECK(i.splice(U, ends[0], NULL, fd, NULL, 100, 0) == 7);
	expect(&p, ACK, "through");
	answer(&p, ACK | PSH, "back");
	expect(&p, ACK, "");
	CHECK(i.splice(U, fd, NULL, ends[1], NULL, 100, 0) == 4);
	CHECK(i.read(U, ends[0], got, 10) == 4 && memcmp(got, "back", 4) == 0);
	int on = 1;
	CHECK(i.ioctl(U, fd, FIONBIO, &on) == 0);
	FAILS(i.splice(U, fd, NULL, ends[1], NULL, 100, 0), EAGAIN);
	struct pollfd two[2] = {{.fd = ends[0], .events = POLLIN}, {.fd = fd, .events = POLLOUT}};
	CHECK(i.poll(U, two, 2, 0) == 1 && two[0].revents == 0 && two[1].revents == POLLOUT);
	CHECK(i.close(U, ends[0]) == 0 && i.close(U, ends[1]) == 0 && i.close(U, fd) == 0);
}

static void times(void)
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
		struct segment s = expect(&p, ACK, "tick");
		CHECK(s.time >= before);
		early += s.time < after;
		CHECK(s.time > last);
		last = s.time;
		answer(&p, ACK, "");
	}
	/* Of when it left, not of when it was asked for; a machine that others use may keep some of them. */
	CHECK(early >= 15);
}

/* More than a channel holds goes in one call, as far as the buffers of a socket go. */
static void large_ones(void)
{
	enum { MANY = 400000, SOME = 150000 };
	static char data[MANY];
	struct peer p = PEER;
	int fd = established(&p), size = 200000;
	CHECK(i.setsockopt(U, fd, SOL_SOCKET, SO_SNDBUF, &size, sizeof size) == 0);
	CHECK(i.write(U, fd, data, MANY) == MANY);
	for (int count = 0; count < 10; count++)
		CHECK(caught().len == 1460);
	CHECK(i.fcntl(U, fd, F_SETFL, O_RDWR | O_NONBLOCK) == 0);
	int more = i.write(U, fd, data, MANY);
	CHECK(more == -1 ? errno == EAGAIN : more < MANY);
	/* As much as was announced comes in before anything is read. */
	for (int came = 0; came < SOME; came += 1000) {
		struct segment s = {.from = p.port, .to = p.local_port, .seq = p.next, .ack = p.acked, .flags = ACK, .window = 65535, .len = 1000};
		inject(&s);
		p.next += 1000;
	}
	CHECK(i.read(U, fd, data, MANY) == SOME);
	FAILS(i.read(U, fd, data, MANY), EAGAIN);
}

/* A write ends where the send buffer is full, but for what the last buffer of whole segments takes, and the socket is writable again when a third is free. */
static void send_buffer(void)
{
	enum { MANY = 400000, FIRST = 87040, BUFFER = 32767 / 1460 * 1460 };
	static char data[MANY];
	struct peer p = PEER;
	int fd = established(&p), size;
	struct pollfd one = {.fd = fd, .events = POLLOUT};
	CHECK(i.fcntl(U, fd, F_SETFL, O_RDWR | O_NONBLOCK) == 0);
	CHECK(i.poll(U, &one, 1, 0) == 1 && one.revents == POLLOUT);
	/* It has room for twice ten segments at the least, as the kernel counts them. */
	int wrote = i.write(U, fd, data, MANY);
	CHECK(wrote >= FIRST && wrote < FIRST + BUFFER);
	CHECK(i.poll(U, &one, 1, 0) == 0);
	FAILS(i.write(U, fd, data, MANY), EAGAIN);
	socklen_t len = sizeof size;
	CHECK(i.getsockopt(U, fd, SOL_SOCKET, SO_SNDBUF, &size, &len) == 0 && size == FIRST);
	for (int count = 0; count < 10; count++)
		CHECK(caught().len == 1460);
	/* A script that sets it has what it sets, twice. */
	struct peer q = PEER;
	q.port++, q.local_port++;
	int other = established(&q), set = 10000;
	CHECK(i.setsockopt(U, other, SOL_SOCKET, SO_SNDBUF, &set, sizeof set) == 0);
	CHECK(i.fcntl(U, other, F_SETFL, O_RDWR | O_NONBLOCK) == 0);
	wrote = i.write(U, other, data, MANY);
	CHECK(wrote >= 20000 && wrote < 20000 + BUFFER + 10 * 1460);
	FAILS(i.write(U, other, data, MANY), EAGAIN);
}

static int open_descriptors(void)
{
	int count = 0;
	for (int fd = 0; fd < 4096; fd++)
		count += fcntl(fd, F_GETFD) >= 0;
	return count;
}

static void again_and_again(void)
{
	struct interface other;
	i.free(U);
	int before = open_descriptors();
	for (int round = 0; round < 20; round++) {
		CHECK(init(NULL, &i) == 0);
		passive();
		/* What is still open goes too. */
		listener(0, 9999);
		i.free(U);
		CHECK(open_descriptors() == before);
	}
	/* Two beside each other have nothing to do with each other. */
	CHECK(init(NULL, &other) == 0 && init(NULL, &i) == 0);
	CHECK(other.userdata != i.userdata);
	int a = listener(0, 8080);
	struct interface first = i;
	i = other;
	int b = listener(0, 8080);
	CHECK(a != b);
	CHECK(i.close(U, b) == 0);
	passive();
	i.free(U);
	i = first;
	CHECK(i.close(U, a) == 0);
	passive();
}

/* The flags of this case are wrong. */
static void wrong_flags(void)
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

/* The flags of this case name a folder in which SACK and timestamps are off. */
static void plain_options(void)
{
	struct peer p = {.port = 80};
	struct waiting *w = start(connects, i.socket(U, AF_INET, SOCK_STREAM, 0));
	struct segment syn = expect(&p, SYN, "");
	CHECK(has_option(&syn, 2) && !has_option(&syn, 4) && !has_option(&syn, 8));
	CHECK(syn.options[2] << 8 | (syn.options[3] == 0));
	CHECK(get16(syn.options + 2) == 960); /* of packets of 1000 bytes */
	p.local_port = syn.from;
	answer(&p, RST | ACK, "");
	CHECK(result(w) == -1);
}

static void bad_packets(void)
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
	/* Too little room: the packet is lost, and said to be. */
	struct peer q = {.port = 41000, .local_port = 99, .next = 77};
	answer(&q, SYN, "");
	FAILS(i.netdev_receive(U, packet, &len, &time), EMSGSIZE);
	CHECK(len == 0);
}

/* Datagrams both ways, with their addresses. */
static void datagrams(void)
{
	socklen_t len;
	struct sockaddr_storage own = name(0, LOCAL[0], 8080, &len), from, to = name(0, REMOTE[0], 40000, &len);
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
	{"passive", passive}, {"passive_v6", passive_v6}, {"active", active}, {"refused", refused},
	{"reset", reset}, {"waiting_for_readiness", waiting_for_readiness}, {"without_waiting", without_waiting},
	{"messages", messages}, {"pipes", pipes}, {"times", times}, {"large_ones", large_ones}, {"send_buffer", send_buffer}, {"again_and_again", again_and_again},
	{"wrong_flags", wrong_flags}, {"plain_options", plain_options}, {"bad_packets", bad_packets}, {"datagrams", datagrams},
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
		int wrong = CASES[n].run == wrong_flags;
		CHECK(init(argv[3], &i) == (wrong ? -1 : 0));
		CASES[n].run();
		i.free(U);
		return 0;
	}
	fprintf(stderr, "no case %s\n", argv[2]);
	return 1;
}
