/* Does what packetdrill does around and in a script, in its order: real-time priority and locked memory first, a thread for calls that wait, the library, then the script's first
   command, a tenth of a second to get in step with the clock, the script, code and leftovers past the interface, and the next script.
   Usage: as_packetdrill LIBRARY VERSION FOLDER [OPTIONS OF PACKETDRILL]. */
#include "driver.h"
#include <sched.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/syscall.h>
#include <sys/times.h>

static int v6, mapped;
static const char *folder;

/* As `sysctl -q net.ipv4.NAME=VALUE`. */
static void sysctl(const char *setting, const char *value)
{
	char path[300];
	snprintf(path, sizeof path, "%s/%s", folder, setting);
	FILE *file = fopen(path, "w");
	CHECK(file && fprintf(file, "%s\n", value) > 0 && fclose(file) == 0);
}

/* A program's name of an address of the script's, which may be that of IPv4 in IPv6. */
static struct sockaddr_storage live(const char *address, int port, socklen_t *len)
{
	char in_six[64];
	snprintf(in_six, sizeof in_six, "%s%s", mapped ? "::ffff:" : "", address);
	return name(v6 || mapped, in_six, port, len);
}

/* ---- the thread for calls that wait ---- */

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
static int ends;

static void *calls(void *nothing)
{
	pthread_mutex_lock(&lock);
	thread_id = syscall(SYS_gettid);
	while (!ends) {
		if (job) {
			struct job *mine = job;
			pthread_mutex_unlock(&lock);
			mine->result = mine->call(mine->fd, &mine->name, &mine->len);
			pthread_mutex_lock(&lock);
			job = NULL;
			pthread_cond_broadcast(&changed);
		} else {
			pthread_cond_wait(&changed, &lock);
		}
	}
	pthread_mutex_unlock(&lock);
	return nothing;
}

static int sleeps(pid_t thread)
{
	char path[64], line[512] = {0};
	snprintf(path, sizeof path, "/proc/self/task/%d/stat", thread);
	FILE *file = fopen(path, "r");
	CHECK(file && fgets(line, sizeof line, file) && fclose(file) == 0);
	return strchr(line, ')')[2] == 'S';
}

/* Begins a call, and goes on when it waits or is done. */
static void begin(struct job *next)
{
	pthread_mutex_lock(&lock);
	job = next;
	pthread_cond_broadcast(&changed);
	for (int settled = 0; !settled;) {
		pthread_mutex_unlock(&lock);
		sched_yield();
		settled = sleeps(thread_id);
		pthread_mutex_lock(&lock);
		settled |= job == NULL;
	}
	pthread_mutex_unlock(&lock);
}

static int end(struct job *begun)
{
	pthread_mutex_lock(&lock);
	while (job == begun)
		pthread_cond_wait(&changed, &lock);
	pthread_mutex_unlock(&lock);
	return begun->result;
}

static int accepts(int fd, struct sockaddr_storage *from, socklen_t *len)
{
	return i.accept(U, fd, (void *)from, len);
}

static int opens(int fd, struct sockaddr_storage *to, socklen_t *len)
{
	return i.connect(U, fd, (void *)to, *len);
}

/* ---- a script ---- */

static long long in_step(void)
{
	long long start = 0;
	clock_t last = times(NULL);
	for (int ticks = 0; ticks < 10;) {
		clock_t next = times(NULL);
		if (next != last) {
			start = now();
			ticks++;
		}
		last = next;
	}
	return start;
}

/* What a script's code asks about, by libc. */
static void look(int fd, struct tcp_info *info)
{
	char rest[512];
	socklen_t len = sizeof *info;
	memset(info, 0xee, sizeof *info);
	CHECK(getsockopt(fd, IPPROTO_TCP, TCP_INFO, info, &len) == 0 && len == sizeof *info);
	len = sizeof rest;
	CHECK(getsockopt(fd, IPPROTO_TCP, 26 /* TCP_CC_INFO */, rest, &len) == 0);
	len = 9 * sizeof(uint32_t);
	CHECK(getsockopt(fd, SOL_SOCKET, 55 /* SO_MEMINFO */, rest, &len) == 0 && len == 9 * sizeof(uint32_t));
	/* Others are the kernel's. */
	FAILS(getsockopt(-1, IPPROTO_TCP, TCP_INFO, info, &len), EBADF);
}

/* A reset with what the stack expects next, as packetdrill sends when a script is done. */
static void clear(struct peer *p)
{
	struct segment s = {.v6 = v6, .from = p->port, .to = p->local_port, .seq = p->next, .ack = p->acked, .flags = RST | ACK};
	inject(&s);
}

static void passive(int sack)
{
	struct peer p = {.v6 = v6, .port = 40001, .local_port = 8080, .next = 1};
	int one = 1, command, l = i.socket(U, v6 || mapped ? AF_INET6 : AF_INET, SOCK_STREAM, IPPROTO_TCP);
	socklen_t len;
	struct sockaddr_storage own = live(LOCAL[v6], 8080, &len);
	long long before = now();
	CHECK(l >= 0);
	CHECK(i.setsockopt(U, l, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) == 0);
	CHECK(i.bind(U, l, (void *)&own, len) == 0);
	CHECK(i.listen(U, l, 1) == 0);
	/* All memory is locked, so the stack is there in whole: a gigabyte of it would show. */
	CHECK(now() - before < 1000000);

	struct job accepting = {.call = accepts, .fd = l, .len = sizeof accepting.name};
	begin(&accepting);
	const uint8_t options[] = {2, 4, 1000 >> 8, 1000 & 255, 4, 2, 1, 1, 1, 3, 3, 7};
	struct segment syn = {.v6 = v6, .from = p.port, .to = p.local_port, .seq = 0, .flags = SYN, .window = 32792};
	syn.options_len = sizeof options;
	memcpy(syn.options, options, sizeof options);
	inject(&syn);
	struct segment answered = expect(&p, SYN | ACK, "");
	CHECK(answered.options[0] == 2 && get16(answered.options + 2) == 1460);
	CHECK(!has_option(&answered, 8) && !has_option(&answered, 4) == !sack);
	CHECK(answered.options[answered.options_len - 3] == 3 && answered.options[answered.options_len - 1] == 8);
	answer(&p, ACK, "");
	int fd = end(&accepting);
	CHECK(fd >= 0);
	struct sockaddr_storage remote = live(REMOTE[v6], p.port, &len);
	CHECK(accepting.len == len && memcmp(&accepting.name, &remote, len) == 0);

	struct tcp_info info;
	char data[2001] = {0};
	memset(data, 'd', sizeof data - 1);
	CHECK(i.write(U, fd, data, 2000) == 2000);
	struct segment first = caught(), second = caught();
	CHECK(first.len == 1000 && second.len == 1000 && second.flags & PSH);
	p.acked = second.seq + 1000;
	look(fd, &info);
	CHECK(info.tcpi_state == TCP_ESTABLISHED && info.tcpi_snd_cwnd == 10 && info.tcpi_unacked == 2);
	answer(&p, ACK, "");
	look(fd, &info);
	CHECK(info.tcpi_snd_cwnd == 10 && info.tcpi_unacked == 0);

	/* A file, by libc. */
	char path[300];
	snprintf(path, sizeof path, "%s/tcp_sack", folder);
	int file = open(path, O_RDONLY);
	off_t offset = 0;
	CHECK(file >= 0);
	CHECK(sendfile(fd, file, &offset, 2) == 2 && offset == 2);
	expect(&p, ACK, sack ? "1\n" : "0\n");
	CHECK(close(file) == 0);
	FAILS(close(file), EBADF);

	/* A pipe, with pointers to offsets that are null. */
	int ends[2];
	loff_t none[2] = {0, 0};
	answer(&p, ACK | PSH, "piped");
	expect(&p, ACK, "");
	CHECK(i.pipe(U, ends) == 0);
	CHECK(i.splice(U, fd, &none[0], ends[1], &none[1], 10, 0) == 5);
	CHECK(i.splice(U, ends[0], &none[0], fd, &none[1], 10, 0) == 5);
	expect(&p, ACK, "piped");
	answer(&p, ACK, "");

	CHECK(i.ioctl(U, fd, 0x541b /* SIOCINQ */, &command) == 0 && command == 0);
	CHECK(i.fcntl(U, fd, F_SETFL, O_RDWR | O_NONBLOCK) == 0);
	CHECK(i.fcntl(U, fd, F_GETFL) == (O_RDWR | O_NONBLOCK));
	/* What a script leaves open packetdrill closes by libc, and resets. */
	CHECK(close(fd) == 0);
	expect(&p, FIN | ACK, "");
	clear(&p);
	CHECK(close(l) == 0 && close(ends[0]) == 0 && close(ends[1]) == 0);
	FAILS(i.listen(U, l, 1), EBADF);
}

/* Opens a connection, and disconnects by an address of no family. */
static void active(void)
{
	struct peer p = {.v6 = v6, .port = 8080, .next = 70000};
	int fd = i.socket(U, v6 || mapped ? AF_INET6 : AF_INET, SOCK_STREAM, IPPROTO_TCP);
	struct job opening = {.call = opens, .fd = fd};
	opening.name = live(REMOTE[v6], 8080, &opening.len);
	begin(&opening);
	const char *bound = LOCAL[v6];
	LOCAL[v6] = v6 ? "fd3d:fa7b:d17d::2" : "192.168.0.2";
	p.local_port = expect(&p, SYN, "").from;
	answer(&p, SYN | ACK, "");
	expect(&p, ACK, "");
	CHECK(end(&opening) == 0);
	struct sockaddr_storage nowhere = {.ss_family = AF_UNSPEC};
	CHECK(i.connect(U, fd, (void *)&nowhere, sizeof nowhere) == 0);
	expect(&p, RST | ACK, "");
	clear(&p);
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
	/* Neither is for everybody. */
	if (sched_setscheduler(0, SCHED_RR, &priority) || mlockall(MCL_CURRENT | MCL_FUTURE))
		fprintf(stderr, "without priority, or locked memory: %s\n", strerror(errno));

	/* An address for each script. */
	const char *own[2][2] = {{"192.168.0.9", "fd3d:fa7b:d17d::"}, {"192.168.213.4", "fd3d:fa7b:d17d::9abc:def1"}};
	for (int script = 0; script < 2; script++) {
		char flags[300];
		pthread_t thread;
		LOCAL[v6] = own[script][v6];
		ends = thread_id = 0;
		CHECK(pthread_create(&thread, NULL, calls, NULL) == 0);
		void *library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE | RTLD_DEEPBIND);
		CHECK(library);
		init = (init_fn)dlsym(library, "packetdrill_interface_init");
		snprintf(flags, sizeof flags, "proc=%s", folder);
		sysctl("tcp_sack", "1");
		sysctl("tcp_rmem", "4096 131072 6291456");
		sysctl("tcp_timestamps", "1");
		init(flags, &i);
		/* The script's first command. */
		sysctl("tcp_rmem", "4096 540000 15728640");
		sysctl("tcp_timestamps", "0");
		CHECK(llabs(in_step() - now()) < 200000);
		/* A command behind it. */
		sysctl("tcp_sack", script ? "0" : "1");
		passive(!script);
		active();

		pthread_mutex_lock(&lock);
		ends = 1;
		pthread_cond_broadcast(&changed);
		pthread_mutex_unlock(&lock);
		CHECK(pthread_join(thread, NULL) == 0);
		i.free(U);
		CHECK(dlclose(library) == 0);
	}
	return 0;
}
