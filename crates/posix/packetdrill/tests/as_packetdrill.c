/* Performs the steps of packetdrill, in its order, for two scripts:
   - real-time priority and locked memory,
   - a thread for blocking calls,
   - loading the library,
   - the first command of the script,
   - a tenth of a second to synchronise with the clock,
   - the script, with calls of libc past the interface,
   - closing of what the script left open.
   Usage: as_packetdrill LIBRARY VERSION FOLDER [OPTIONS OF PACKETDRILL]. */
#include "driver.h"
#include <sched.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/syscall.h>
#include <sys/times.h>

static int v6, mapped;
static const char *folder;

/* Writes a setting, like `sysctl -q net.ipv4.NAME=VALUE`. */
static void sysctl(const char *setting, const char *value)
{
	char path[300];
	snprintf(path, sizeof path, "%s/%s", folder, setting);
	FILE *file = fopen(path, "w");
	CHECK(file && fprintf(file, "%s\n", value) > 0 && fclose(file) == 0);
}

/* Returns the socket address of an address of the script, which may be an IPv4-mapped IPv6 address. */
static struct sockaddr_storage script_address(const char *address, int port, socklen_t *len)
{
	char in_six[64];
	snprintf(in_six, sizeof in_six, "%s%s", mapped ? "::ffff:" : "", address);
	return socket_address(v6 || mapped, in_six, port, len);
}

/* ---- the thread for blocking calls ---- */

struct job {
	int (*call)(int fd, struct sockaddr_storage *, socklen_t *);
	int fd, result;
	struct sockaddr_storage name;
	socklen_t len;
};
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct job *job;
static pid_t thread_id;
static int stopping;

static void *call_thread(void *unused)
{
	pthread_mutex_lock(&lock);
	thread_id = syscall(SYS_gettid);
	while (!stopping) {
		if (job) {
			struct job *current = job;
			pthread_mutex_unlock(&lock);
			current->result = current->call(current->fd, &current->name, &current->len);
			pthread_mutex_lock(&lock);
			job = NULL;
			pthread_cond_broadcast(&changed);
		} else {
			pthread_cond_wait(&changed, &lock);
		}
	}
	pthread_mutex_unlock(&lock);
	return unused;
}

static int is_sleeping(pid_t thread)
{
	char path[64], line[512] = {0};
	snprintf(path, sizeof path, "/proc/self/task/%d/stat", thread);
	FILE *file = fopen(path, "r");
	CHECK(file && fgets(line, sizeof line, file) && fclose(file) == 0);
	return strchr(line, ')')[2] == 'S';
}

/* Starts a call, and returns when the call blocks or has returned. */
static void begin_call(struct job *next)
{
	pthread_mutex_lock(&lock);
	job = next;
	pthread_cond_broadcast(&changed);
	for (int settled = 0; !settled;) {
		pthread_mutex_unlock(&lock);
		sched_yield();
		settled = is_sleeping(thread_id);
		pthread_mutex_lock(&lock);
		settled |= job == NULL;
	}
	pthread_mutex_unlock(&lock);
}

static int finish_call(struct job *begun)
{
	pthread_mutex_lock(&lock);
	while (job == begun)
		pthread_cond_wait(&changed, &lock);
	pthread_mutex_unlock(&lock);
	return begun->result;
}

static int call_accept(int fd, struct sockaddr_storage *from, socklen_t *len)
{
	return i.accept(U, fd, (void *)from, len);
}

static int call_connect(int fd, struct sockaddr_storage *to, socklen_t *len)
{
	return i.connect(U, fd, (void *)to, *len);
}

/* ---- a script ---- */

static void sync_to_tick(void)
{
	clock_t last = times(NULL);
	for (int ticks = 0; ticks < 10;) {
		clock_t next = times(NULL);
		ticks += next != last;
		last = next;
	}
}

/* Reads the options that the code of a script reads through libc. */
static void check_tcp_info(int fd, struct tcp_info *info)
{
	char rest[512];
	socklen_t len = sizeof *info;
	memset(info, 0xee, sizeof *info);
	CHECK(getsockopt(fd, IPPROTO_TCP, TCP_INFO, info, &len) == 0 && len == sizeof *info);
	len = sizeof rest;
	CHECK(getsockopt(fd, IPPROTO_TCP, 26 /* TCP_CC_INFO */, rest, &len) == 0);
	len = 9 * sizeof(uint32_t);
	CHECK(getsockopt(fd, SOL_SOCKET, 55 /* SO_MEMINFO */, rest, &len) == 0 && len == 9 * sizeof(uint32_t));
	/* libc passes other descriptors to the kernel. */
	FAILS(getsockopt(-1, IPPROTO_TCP, TCP_INFO, info, &len), EBADF);
}

/* Sends a RST with the sequence number that the stack expects next, like packetdrill at the end of a
   script. */
static void send_reset(struct peer *p)
{
	struct segment s = {.v6 = v6, .from = p->port, .to = p->local_port, .flags = RST | ACK};
	s.seq = p->next;
	s.ack = p->acked;
	inject(&s);
}

static void passive(int sack)
{
	struct peer p = {.v6 = v6, .port = 40001, .local_port = 8080, .next = 1};
	int one = 1, queued, l = i.socket(U, v6 || mapped ? AF_INET6 : AF_INET, SOCK_STREAM, IPPROTO_TCP);
	socklen_t len;
	struct sockaddr_storage own = script_address(LOCAL[v6], 8080, &len);
	long long before = now();
	CHECK(l >= 0);
	CHECK(i.setsockopt(U, l, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) == 0);
	CHECK(i.bind(U, l, (void *)&own, len) == 0);
	CHECK(i.listen(U, l, 1) == 0);
	/* If memory could be locked, all of it is resident: a stack that touched a gigabyte here would take
	   longer than a second. */
	CHECK(now() - before < 1000000);

	struct job accepting = {.call = call_accept, .fd = l, .len = sizeof accepting.name};
	begin_call(&accepting);
	const uint8_t options[] = {2, 4, 1000 >> 8, 1000 & 255, 4, 2, 1, 1, 1, 3, 3, 7};
	struct segment syn = {.v6 = v6, .from = p.port, .to = p.local_port, .seq = 0, .flags = SYN, .window = 32792};
	syn.options_len = sizeof options;
	memcpy(syn.options, options, sizeof options);
	inject(&syn);
	struct segment answered = expect_segment(&p, SYN | ACK, "");
	CHECK(answered.options[0] == 2 && get16(answered.options + 2) == 1460);
	CHECK(!has_option(&answered, 8) && !has_option(&answered, 4) == !sack);
	CHECK(answered.options[answered.options_len - 3] == 3 && answered.options[answered.options_len - 1] == 8);
	send_segment(&p, ACK, "");
	int fd = finish_call(&accepting);
	CHECK(fd >= 0);
	struct sockaddr_storage remote = script_address(REMOTE[v6], p.port, &len);
	CHECK(accepting.len == len && memcmp(&accepting.name, &remote, len) == 0);

	struct tcp_info info;
	char data[2001] = {0};
	memset(data, 'd', sizeof data - 1);
	CHECK(i.write(U, fd, data, 2000) == 2000);
	struct segment first = next_segment(), second = next_segment();
	CHECK(first.len == 1000 && second.len == 1000 && second.flags & PSH);
	p.acked = second.seq + 1000;
	check_tcp_info(fd, &info);
	CHECK(info.tcpi_state == TCP_ESTABLISHED && info.tcpi_snd_cwnd == 10 && info.tcpi_unacked == 2);
	send_segment(&p, ACK, "");
	check_tcp_info(fd, &info);
	CHECK(info.tcpi_snd_cwnd == 10 && info.tcpi_unacked == 0);

	/* sendfile of libc. */
	char path[300];
	snprintf(path, sizeof path, "%s/tcp_sack", folder);
	int file = open(path, O_RDONLY);
	off_t offset = 0;
	CHECK(file >= 0);
	CHECK(sendfile(fd, file, &offset, 2) == 2 && offset == 2);
	expect_segment(&p, ACK, sack ? "1\n" : "0\n");
	CHECK(close(file) == 0);
	FAILS(close(file), EBADF);

	/* splice with pointers to offsets of 0. */
	int ends[2];
	loff_t none[2] = {0, 0};
	send_segment(&p, ACK | PSH, "piped");
	expect_segment(&p, ACK, "");
	CHECK(i.pipe(U, ends) == 0);
	CHECK(i.splice(U, fd, &none[0], ends[1], &none[1], 10, 0) == 5);
	CHECK(i.splice(U, ends[0], &none[0], fd, &none[1], 10, 0) == 5);
	expect_segment(&p, ACK, "piped");
	send_segment(&p, ACK, "");

	CHECK(i.ioctl(U, fd, 0x541b /* SIOCINQ */, &queued) == 0 && queued == 0);
	CHECK(i.fcntl(U, fd, F_SETFL, O_RDWR | O_NONBLOCK) == 0);
	CHECK(i.fcntl(U, fd, F_GETFL) == (O_RDWR | O_NONBLOCK));
	/* At the end of a script, packetdrill closes through libc what the script left open, and resets the
	   connections. */
	CHECK(close(fd) == 0);
	expect_segment(&p, FIN | ACK, "");
	send_reset(&p);
	CHECK(close(l) == 0 && close(ends[0]) == 0 && close(ends[1]) == 0);
	FAILS(i.listen(U, l, 1), EBADF);
}

/* Opens a connection, and disconnects it with an address of AF_UNSPEC. */
static void active(void)
{
	struct peer p = {.v6 = v6, .port = 8080, .next = 70000};
	int fd = i.socket(U, v6 || mapped ? AF_INET6 : AF_INET, SOCK_STREAM, IPPROTO_TCP);
	struct job opening = {.call = call_connect, .fd = fd};
	opening.name = script_address(REMOTE[v6], 8080, &opening.len);
	begin_call(&opening);
	/* An unbound socket sends from the library's default address, not from that of this script. */
	const char *bound = LOCAL[v6];
	LOCAL[v6] = v6 ? "fd3d:fa7b:d17d::2" : "192.168.0.2";
	p.local_port = expect_segment(&p, SYN, "").from;
	send_segment(&p, SYN | ACK, "");
	expect_segment(&p, ACK, "");
	CHECK(finish_call(&opening) == 0);
	struct sockaddr_storage unspecified = {.ss_family = AF_UNSPEC};
	CHECK(i.connect(U, fd, (void *)&unspecified, sizeof unspecified) == 0);
	expect_segment(&p, RST | ACK, "");
	send_reset(&p);
	CHECK(close(fd) == 0);
	LOCAL[v6] = bound;
}

int main(int argc, char **argv)
{
	CHECK(argc >= 4);
	v6 = strcmp(argv[2], "ipv6") == 0;
	mapped = strcmp(argv[2], "ipv4-mapped-ipv6") == 0;
	folder = argv[3];
	struct sched_param priority = {.sched_priority = sched_get_priority_min(SCHED_RR)};
	/* Both need privileges. */
	if (sched_setscheduler(0, SCHED_RR, &priority) || mlockall(MCL_CURRENT | MCL_FUTURE))
		fprintf(stderr, "real-time priority or locked memory is not available: %s\n", strerror(errno));

	/* An address for each script. */
	const char *own[2][2] = {
		{"192.168.0.9", "fd3d:fa7b:d17d::"},
		{"192.168.213.4", "fd3d:fa7b:d17d::9abc:def1"},
	};
	for (int script = 0; script < 2; script++) {
		char flags[300];
		pthread_t thread;
		LOCAL[v6] = own[script][v6];
		stopping = thread_id = 0;
		CHECK(pthread_create(&thread, NULL, call_thread, NULL) == 0);
		void *library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE | RTLD_DEEPBIND);
		CHECK(library);
		init = (init_fn)dlsym(library, "packetdrill_interface_init");
		snprintf(flags, sizeof flags, "proc=%s", folder);
		sysctl("tcp_sack", "1");
		sysctl("tcp_rmem", "4096 131072 6291456");
		sysctl("tcp_timestamps", "1");
		init(flags, &i);
		/* The first command of the script. */
		sysctl("tcp_rmem", "4096 540000 15728640");
		sysctl("tcp_timestamps", "0");
		sync_to_tick();
		/* A command of the script after the first. */
		sysctl("tcp_sack", script ? "0" : "1");
		passive(!script);
		active();

		pthread_mutex_lock(&lock);
		stopping = 1;
		pthread_cond_broadcast(&changed);
		pthread_mutex_unlock(&lock);
		CHECK(pthread_join(thread, NULL) == 0);
		i.free(U);
		CHECK(dlclose(library) == 0);
	}
	return 0;
}
