/* The interface of libpacketdrill_ginnel.so, packets in bytes, and the remote end of a connection. A failed
   check prints its condition, and exits with 1. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <unistd.h>

/* The functions of the interface, in the order of packetdrill. */
struct interface {
	void *userdata;
	void (*free)(void *);
	int (*socket)(void *, int, int, int);
	int (*bind)(void *, int, const struct sockaddr *, socklen_t);
	int (*listen)(void *, int, int);
	int (*accept)(void *, int, struct sockaddr *, socklen_t *);
	int (*connect)(void *, int, const struct sockaddr *, socklen_t);
	ssize_t (*read)(void *, int, void *, size_t);
	ssize_t (*readv)(void *, int, const struct iovec *, int);
	ssize_t (*recv)(void *, int, void *, size_t, int);
	ssize_t (*recvfrom)(void *, int, void *, size_t, int, struct sockaddr *, socklen_t *);
	ssize_t (*recvmsg)(void *, int, struct msghdr *, int);
	ssize_t (*write)(void *, int, const void *, size_t);
	ssize_t (*writev)(void *, int, const struct iovec *, int);
	ssize_t (*send)(void *, int, const void *, size_t, int);
	ssize_t (*sendto)(void *, int, const void *, size_t, int, const struct sockaddr *, socklen_t);
	ssize_t (*sendmsg)(void *, int, const struct msghdr *, int);
	int (*fcntl)(void *, int, int, ...);
	int (*ioctl)(void *, int, unsigned long, ...);
	int (*close)(void *, int);
	int (*shutdown)(void *, int, int);
	int (*getsockopt)(void *, int, int, int, void *, socklen_t *);
	int (*setsockopt)(void *, int, int, int, const void *, socklen_t);
	int (*poll)(void *, struct pollfd *, nfds_t, int);
	int (*netdev_send)(void *, const void *, size_t);
	int (*netdev_receive)(void *, void *, size_t *, long long *);
	int (*usleep)(void *, useconds_t);
	int (*gettimeofday)(void *, struct timeval *, struct timezone *);
	int (*epoll_create)(void *, int);
	int (*epoll_ctl)(void *, int, int, int, struct epoll_event *);
	int (*epoll_wait)(void *, int, struct epoll_event *, int, int);
	int (*pipe)(void *, int[2]);
	ssize_t (*splice)(void *, int, loff_t *, int, loff_t *, size_t, unsigned);
};

typedef int (*init_fn)(const char *, struct interface *);

static init_fn init;
static struct interface i;
#define U i.userdata

#define CHECK(condition) \
	do { \
		if (!(condition)) { \
			fprintf(stderr, "line %d: %s (errno %d, %s)\n", __LINE__, #condition, errno, strerror(errno)); \
			exit(1); \
		} \
	} while (0)
#define FAILS(call, reason) \
	do { \
		errno = 0; \
		CHECK((call) == -1); \
		CHECK(errno == (reason)); \
	} while (0)

/* ---- packets ---- */

enum { FIN = 1, SYN = 2, RST = 4, PSH = 8, ACK = 16 };

struct segment {
	int v6;
	uint16_t from, to;
	uint32_t seq, ack;
	int flags, window;
	uint8_t options[40];
	int options_len;
	uint8_t data[2000];
	int len;
	long long time;
};

static const char *LOCAL[2] = {"192.168.0.2", "fd3d:fa7b:d17d::2"};
static const char *REMOTE[2] = {"192.0.2.1", "2001:db8::1"};

static uint32_t sum(const uint8_t *bytes, int len, uint32_t sum)
{
	for (int at = 0; at < len; at++)
		sum += at % 2 ? bytes[at] : bytes[at] << 8;
	return sum;
}

static uint16_t folded(uint32_t sum)
{
	while (sum >> 16)
		sum = (sum & 0xffff) + (sum >> 16);
	return ~sum & 0xffff;
}

static void put16(uint8_t *at, uint32_t value)
{
	at[0] = value >> 8;
	at[1] = value;
}

static void put32(uint8_t *at, uint32_t value)
{
	put16(at, value >> 16);
	put16(at + 2, value);
}

static uint32_t get16(const uint8_t *at) { return at[0] << 8 | at[1]; }
static uint32_t get32(const uint8_t *at) { return get16(at) << 16 | get16(at + 2); }

/* Sends a segment from the remote end to the stack. */
static void inject(const struct segment *s)
{
	uint8_t packet[3000] = {0};
	int header = s->v6 ? 40 : 20, address = s->v6 ? 16 : 4;
	int tcp_header = 20 + s->options_len, tcp_len = tcp_header + s->len;
	uint8_t *tcp = packet + header, *source = packet + (s->v6 ? 8 : 12);

	if (s->v6) {
		packet[0] = 0x60;
		put16(packet + 4, tcp_len);
		packet[6] = 6;
		packet[7] = 64;
	} else {
		packet[0] = 0x45;
		put16(packet + 2, header + tcp_len);
		packet[8] = 64;
		packet[9] = 6;
	}
	CHECK(inet_pton(s->v6 ? AF_INET6 : AF_INET, REMOTE[s->v6], source) == 1);
	CHECK(inet_pton(s->v6 ? AF_INET6 : AF_INET, LOCAL[s->v6], source + address) == 1);
	if (!s->v6)
		put16(packet + 10, folded(sum(packet, 20, 0)));
	put16(tcp, s->from);
	put16(tcp + 2, s->to);
	put32(tcp + 4, s->seq);
	put32(tcp + 8, s->ack);
	tcp[12] = tcp_header / 4 << 4;
	tcp[13] = s->flags;
	put16(tcp + 14, s->window);
	memcpy(tcp + 20, s->options, s->options_len);
	memcpy(tcp + tcp_header, s->data, s->len);
	put16(tcp + 16, folded(sum(tcp, tcp_len, sum(source, 2 * address, 6 + tcp_len))));
	CHECK(i.netdev_send(U, packet, header + tcp_len) == 0);
}

/* Receives the next segment that the stack sends, and checks its addresses and checksums. */
static struct segment next_segment(void)
{
	uint8_t packet[3000];
	size_t len = sizeof packet;
	struct segment s = {0};
	CHECK(i.netdev_receive(U, packet, &len, &s.time) == 0);
	CHECK(len >= 40);
	s.v6 = packet[0] >> 4 == 6;
	int header = s.v6 ? 40 : (packet[0] & 15) * 4, address = s.v6 ? 16 : 4;
	uint8_t *tcp = packet + header, *source = packet + (s.v6 ? 8 : 12);
	int tcp_len = len - header, tcp_header = (tcp[12] >> 4) * 4;
	uint8_t expected[16];
	CHECK(inet_pton(s.v6 ? AF_INET6 : AF_INET, LOCAL[s.v6], expected) == 1);
	CHECK(memcmp(source, expected, address) == 0);
	CHECK(inet_pton(s.v6 ? AF_INET6 : AF_INET, REMOTE[s.v6], expected) == 1);
	CHECK(memcmp(source + address, expected, address) == 0);
	CHECK(packet[s.v6 ? 6 : 9] == 6);
	CHECK(s.v6 || get16(packet + 2) == len);
	CHECK(s.v6 || folded(sum(packet, header, 0)) == 0);
	CHECK(folded(sum(tcp, tcp_len, sum(source, 2 * address, 6 + tcp_len))) == 0);
	s.from = get16(tcp);
	s.to = get16(tcp + 2);
	s.seq = get32(tcp + 4);
	s.ack = get32(tcp + 8);
	s.flags = tcp[13];
	s.window = get16(tcp + 14);
	s.options_len = tcp_header - 20;
	memcpy(s.options, tcp + 20, s.options_len);
	s.len = tcp_len - tcp_header;
	memcpy(s.data, tcp + tcp_header, s.len);
	return s;
}

static int has_option(const struct segment *s, int kind)
{
	for (int at = 0; at < s->options_len && s->options[at] != 0;) {
		if (s->options[at] == kind)
			return 1;
		at += s->options[at] == 1 ? 1 : s->options[at + 1];
	}
	return 0;
}

/* ---- the remote end of a connection ---- */

struct peer {
	int v6;
	uint16_t port, local_port;
	uint32_t next, acked; /* sequence number to send next, acknowledgement number to send */
};

static void send_segment(struct peer *p, int flags, const char *data)
{
	struct segment s = {.v6 = p->v6, .from = p->port, .to = p->local_port, .seq = p->next, .ack = p->acked};
	s.flags = flags;
	s.window = 65535;
	s.len = strlen(data);
	memcpy(s.data, data, s.len);
	if (flags & SYN) {
		const uint8_t mss[4] = {2, 4, 5, 180};
		memcpy(s.options, mss, 4);
		s.options_len = 4;
	}
	inject(&s);
	p->next += s.len + !!(flags & SYN) + !!(flags & FIN);
}

/* Receives the next segment, and checks its flags, data and acknowledgement number. */
static struct segment expect_segment(struct peer *p, int flags, const char *data)
{
	struct segment s = next_segment();
	CHECK(s.v6 == p->v6 && s.to == p->port);
	if ((s.flags & (SYN | FIN | RST | ACK)) != flags || s.len != (int)strlen(data)) {
		fprintf(stderr, "received a segment with flags %#x and %d bytes, expected %#x and %zu\n", s.flags, s.len, flags, strlen(data));
		exit(1);
	}
	CHECK(memcmp(s.data, data, s.len) == 0);
	CHECK(!(flags & ACK) || (flags & RST) || s.ack == p->next);
	if (!(flags & RST))
		p->acked = s.seq + s.len + !!(flags & SYN) + !!(flags & FIN);
	return s;
}

static struct sockaddr_storage socket_address(int v6, const char *address, int port, socklen_t *len)
{
	struct sockaddr_storage storage = {0};
	struct sockaddr_in *four = (void *)&storage;
	struct sockaddr_in6 *six = (void *)&storage;
	storage.ss_family = v6 ? AF_INET6 : AF_INET;
	*(v6 ? &six->sin6_port : &four->sin_port) = htons(port);
	CHECK(inet_pton(storage.ss_family, address, v6 ? (void *)&six->sin6_addr : (void *)&four->sin_addr) == 1);
	*len = v6 ? sizeof *six : sizeof *four;
	return storage;
}

static long long now(void)
{
	struct timeval t;
	CHECK(i.gettimeofday(U, &t, NULL) == 0);
	return t.tv_sec * 1000000ll + t.tv_usec;
}
