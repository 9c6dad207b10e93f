/* The native API of Ginnel, a TCP/IP stack in user space. docs/c-api.md explains it with examples.
 *
 * A program has one of two forms:
 *
 *   callbacks   ginnel_run() runs a thread for each shard and calls the functions of struct ginnel_callbacks.
 *               Received bytes are passed where the device put them, without a copy.
 *   a loop      ginnel_open(), ginnel_enter(), then ginnel_wait() in a loop, which returns events in two
 *               lists: those above best effort (docs/priorities.md), and the others.
 *
 * All calls act on the shard of the calling thread: that of the callback that is running, or the one that the
 * thread has entered. There they need no lock. Functions that make, read or free a configuration, a stop flag
 * or a stack may be called on any thread, and so may those that say so. All others fail with EPERM on a
 * thread without a shard.
 *
 * Functions that return int or ssize_t return a negative error number, such as -EAGAIN, if they fail;
 * ginnel_error() then has a text about the failure. Comments name errors without the sign. Functions without
 * another result return 0 if they succeed. Structures are passed with all reserved fields 0.
 */
#ifndef GINNEL_H
#define GINNEL_H

#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Returns the version of the library. From any thread. */
const char *ginnel_version(void);

/* Returns a text about the last call of this thread that failed; "" if none has failed. It is valid until
 * the thread's next call of this function. */
const char *ginnel_error(void);

/* ---- Handles ----
 *
 * A handle is valid on the thread of the shard that returned it. One that has outlived its object is refused
 * there (EBADF; ginnel_accept(): EAGAIN, ginnel_send_source(): EINVAL) and never means another object.
 * { 0 } is no handle. */

struct ginnel_conn { uint64_t id; };     /* a connection */
struct ginnel_listener { uint64_t id; }; /* a listening socket */
struct ginnel_udp { uint64_t id; };      /* a UDP socket */
struct ginnel_timer { uint64_t id; };
struct ginnel_fd { uint64_t id; };     /* a kernel descriptor that is watched */
struct ginnel_source { uint64_t id; }; /* memory that is sent without a copy */

/* Returns the slot of a connection: dense from 0, and reused after the connection's end. In a loop it may be
 * reused before GINNEL_EV_CLOSED of the former connection is taken: compare the whole id. */
static inline uint32_t ginnel_conn_index(struct ginnel_conn conn)
{
    return (uint32_t)conn.id - 1;
}

/* ---- Configuration: docs/configuration.md ---- */

struct ginnel_config;

/* Read a file, or the text of one. The program frees *out by ginnel_config_free(). EINVAL: the file cannot
 * be read, or has an error; ginnel_error() names the line and the key. EILSEQ: a string that is not UTF-8. */
int ginnel_config_file(const char *path, struct ginnel_config **out);
int ginnel_config_text(const char *text, struct ginnel_config **out);

/* A frame, valid during the call. payload is that of the TCP segment or UDP datagram, or NULL. */
struct ginnel_packet {
    const uint8_t *frame;
    size_t frame_len;
    const uint8_t *payload;
    size_t payload_len;
    int transmits; /* 0: received, 1: sent */
};

/* Returns the priority of a frame, 0 to 7; usual is what the rules of the configuration, or the device, say.
 * Called for each frame on the threads of all shards. */
typedef uint8_t (*ginnel_classifier)(void *arg, const struct ginnel_packet *packet, uint8_t usual);

/* Sets the function that gives frames their priorities (docs/priorities.md); NULL removes it. */
int ginnel_config_classifier(struct ginnel_config *config, ginnel_classifier function, void *arg);

/* Frees a configuration, also while stacks run with it. NULL is permitted. */
void ginnel_config_free(struct ginnel_config *config);

/* ---- Stop flags and commands, for other threads ---- */

struct ginnel_stop;

/* Creates a flag for ginnel_run() or ginnel_enter(), by which another thread stops the shards. */
int ginnel_stop_new(struct ginnel_stop **out);
void ginnel_stop_set(const struct ginnel_stop *stop); /* From any thread, and from signal handlers. */
/* Frees a flag, also while shards run with it; it cannot be set any more. NULL is permitted. */
void ginnel_stop_free(struct ginnel_stop *stop);

struct ginnel_commander;

/* Creates a sender of commands to this thread's shard. */
int ginnel_commander_new(struct ginnel_commander **out);
/* Sends a number to the shard and wakes it: the callback command, or GINNEL_EV_COMMAND, follows. From any
 * thread. Never waits. EAGAIN: shard.commands_max (1,024 by default) commands wait. ESRCH: the shard has
 * ended. */
int ginnel_command(const struct ginnel_commander *commander, uint64_t token);
/* Frees a sender of commands. From any thread. NULL is permitted. */
void ginnel_commander_free(struct ginnel_commander *commander);

/* ---- Callbacks ---- */

/* A received datagram. len is its length in bytes, also if fewer were written. The port of to is 0. gso_size
 * is 0, or with GINNEL_UDP_GRO the bytes of each of the datagrams that were joined; the last one may be
 * shorter. */
struct ginnel_datagram {
    struct sockaddr_storage from;
    struct sockaddr_storage to;
    size_t len;
    uint8_t tos;
    uint8_t hop_limit;
    uint16_t gso_size;
    uint8_t reserved[4];
};

/* The functions of an application; all but data may be NULL. user is what create returned, or arg of
 * ginnel_run() without create. No function may leave by longjmp() or an exception. While one runs, its shard
 * neither receives nor sends. */
struct ginnel_callbacks {
    size_t size; /* sizeof(struct ginnel_callbacks) */
    /* Called for each application (shards.count, or shard.workers each) on its thread. Returns user. */
    void *(*create)(void *arg, unsigned application);
    /* Called when the addresses can be used: listens, connects, sets timers. Returns 0, or a negative error
     * number, which ends the stack. */
    int (*start)(void *user);
    void (*accepted)(void *user, struct ginnel_conn conn, struct ginnel_listener listener);
    void (*connected)(void *user, struct ginnel_conn conn);
    /* Bytes in order, valid during the call. Returns how many were consumed, from the front. The rest is
     * kept, the receive window shrinks, and the rest is passed again with more, or after ginnel_resume(). */
    size_t (*data)(void *user, struct ginnel_conn conn, const uint8_t *data, size_t len);
    /* Bytes above best effort that arrived early (GINNEL_UNORDERED): ahead bytes of the stream before the
     * first of them were not passed yet. They are passed once. */
    void (*unordered)(void *user, struct ginnel_conn conn, size_t ahead, const uint8_t *data, size_t len);
    void (*writable)(void *user, struct ginnel_conn conn); /* after a short send */
    void (*acked)(void *user, struct ginnel_conn conn, uint32_t bytes); /* GINNEL_ACK_EVENTS */
    /* The peer sent FIN. NULL closes the connection. */
    void (*peer_closed)(void *user, struct ginnel_conn conn);
    /* The connection ended: 0, or the error number. Called once for each connection that ends before its
     * shard. The handle is stale afterwards.
     * ECANCELED: this side aborted it, or closed it with unread data. */
    void (*closed)(void *user, struct ginnel_conn conn, int error);
    void (*datagram)(void *user, struct ginnel_udp socket, const struct ginnel_datagram *datagram,
                     const uint8_t *data, size_t len);
    void (*datagram_error)(void *user, struct ginnel_udp socket, int error);
    void (*timer)(void *user, uint64_t token);
    void (*fd_ready)(void *user, uint64_t token, uint32_t events); /* GINNEL_EV_FD_READABLE, … */
    void (*command)(void *user, uint64_t token);
    void (*destroyed)(void *user, struct ginnel_listener listener); /* ginnel ss -K closed it. */
    /* The stop flag was set: call ginnel_exit() within shard.stop_grace_ms (2,000 ms by default). NULL ends
     * the shard at once. */
    void (*stopping)(void *user);
    void (*ended)(void *user); /* The last call. The shard is gone. */
    /* The peer announced urgent data, or the byte arrived (-1: not yet): ginnel_recv_urgent(). ahead bytes
     * before it were not consumed; negative if it was passed. */
    void (*urgent)(void *user, struct ginnel_conn conn, int32_t ahead, int byte);
};

/* Runs a stack on threads of its own (a single shard on this one) until stop is set, an application calls
 * ginnel_exit(), or one fails. Returns 0, or the negative error number of the failure. stop may be NULL; of
 * several shards, the first one that ends sets it. In callbacks, calls that receive or accept fail with
 * EOPNOTSUPP. EBUSY: this thread has entered a shard. EINVAL: callbacks without data, or of a wrong size. */
int ginnel_run(const struct ginnel_config *config, const struct ginnel_callbacks *callbacks, void *arg,
               const struct ginnel_stop *stop);

/* ---- A loop of the program's own ---- */

enum {
    GINNEL_EV_INCOMING = 1 << 0,     /* listener: ginnel_accept() until EAGAIN */
    GINNEL_EV_CONNECTED = 1 << 1,    /* connection */
    GINNEL_EV_READABLE = 1 << 2,     /* connection: ginnel_recv(), or ginnel_peek(), until EAGAIN */
    GINNEL_EV_UNORDERED = 1 << 3,    /* connection: ginnel_recv_unordered() until EAGAIN */
    GINNEL_EV_WRITABLE = 1 << 4,     /* connection: room to send, after a short send */
    GINNEL_EV_ACKED = 1 << 5,        /* connection: acked bytes were acknowledged */
    GINNEL_EV_PEER_CLOSED = 1 << 6,  /* connection: FIN arrived; unread bytes before it may still be there */
    GINNEL_EV_CLOSED = 1 << 7,       /* connection: its end, after all bytes were received or it was closed */
    GINNEL_EV_DATAGRAMS = 1 << 8,    /* UDP socket: ginnel_udp_recv() until EAGAIN */
    GINNEL_EV_TIMER = 1 << 9,        /* token */
    GINNEL_EV_FD_READABLE = 1 << 10, /* token */
    GINNEL_EV_FD_WRITABLE = 1 << 11, /* token */
    GINNEL_EV_COMMAND = 1 << 12,     /* token */
    GINNEL_EV_DESTROYED = 1 << 13,   /* listener */
    GINNEL_EV_URGENT = 1 << 14,      /* connection: urgent data were announced, or arrived */
};

/* What happened to one object since it was last reported. When GINNEL_EV_CLOSED is taken, the handle of a
 * connection is stale already, except for bytes that are still to be received; error is 0 or the error
 * number. Events that were found before a timer, descriptor or socket was removed may still follow. */
struct ginnel_event {
    uint64_t source; /* the id of the connection, listener or UDP socket */
    uint64_t token;  /* of the connection, timer, descriptor or command */
    uint32_t events;
    uint32_t acked;
    int32_t error;
    uint8_t class_; /* of its frames, the highest first: 0 background, 1 best effort, 2 to 7 */
    uint8_t reserved[3];
};

/* Room for max events. count is written. */
struct ginnel_events {
    struct ginnel_event *events;
    size_t max;
    size_t count;
};

struct ginnel_stack;

/* Opens the devices. The program frees *out by ginnel_close(). EOPNOTSUPP: the configuration has
 * shard.placement other than inline, or shard.workers, which need callbacks. */
int ginnel_open(const struct ginnel_config *config, struct ginnel_stack **out);
/* Returns the number of shards. From any thread. */
int ginnel_shards(const struct ginnel_stack *stack);
/* Makes a shard this thread's own. Every shard of the stack must be entered, each once and by a thread of
 * its own. EINVAL: the stack has no such shard. EBUSY: the shard was entered before, or this thread has one.
 * Returns when the addresses can be used: IPv6 addresses are checked for duplicates first, for a second.
 * stop, which may be NULL, ends ginnel_wait(). ECANCELED: it was set before the addresses could be used;
 * after this and other failures of the start the shard is gone. With several shards, drive all of them until
 * each has nothing left to do before one leaves, since they forward each other's frames. */
int ginnel_enter(const struct ginnel_stack *stack, unsigned shard, const struct ginnel_stop *stop);

/* Receives and sends until there are events. Events of classes above best effort are in high, the others in
 * low, in the order in which they happened. Without high (NULL), both are in low, the former first. Events
 * that find no room are reported by the next call, which looks for more urgent ones first. Returns the
 * number of events; 0 after timeout_ms milliseconds without any (negative: waits without limit); once
 * -ECANCELED when the stop flag is set and no events are left. EFAULT: low is NULL. EINVAL: a list has no
 * room, or both lists have the same memory. */
int ginnel_wait(struct ginnel_events *high, struct ginnel_events *low, int timeout_ms);

/* Ends this thread's shard. What is queued is sent as far as the windows allow; close connections first. */
int ginnel_leave(void);
/* Frees a stack, after all shards were entered. They go on. NULL is permitted. */
void ginnel_close(struct ginnel_stack *stack);

static inline struct ginnel_conn ginnel_event_conn(const struct ginnel_event *event)
{
    struct ginnel_conn conn = { event->source };
    return conn;
}

static inline struct ginnel_listener ginnel_event_listener(const struct ginnel_event *event)
{
    struct ginnel_listener listener = { event->source };
    return listener;
}

static inline struct ginnel_udp ginnel_event_udp(const struct ginnel_event *event)
{
    struct ginnel_udp socket = { event->source };
    return socket;
}

/* ---- TCP ---- */

enum {
    GINNEL_REUSE_PORT = 1 << 0,
    GINNEL_V6_ONLY = 1 << 1,
    GINNEL_NODELAY = 1 << 2,
    GINNEL_KEEPALIVE = 1 << 3,
    GINNEL_ACK_EVENTS = 1 << 4,         /* Acknowledged bytes are reported. */
    GINNEL_UNORDERED = 1 << 5,          /* Unordered receive (docs/unordered.md). */
    GINNEL_FASTOPEN_NO_COOKIE = 1 << 6, /* Fast open: SYNs carry data without a cookie. */
    GINNEL_MAY_FRAGMENT = 1 << 7,       /* Sends over IPv4 without DF: routers may fragment. */
};

/* Options of a listener, whose connections begin with them, or of a connection. 0 takes the default. Of a
 * connection, backlog, GINNEL_REUSE_PORT and GINNEL_V6_ONLY must be 0 (EINVAL). */
struct ginnel_socket_options {
    uint32_t flags;
    uint32_t backlog;
    uint32_t recv_buffer_bytes;
    uint32_t send_buffer_bytes;
    uint16_t mss;
    uint8_t priority; /* 0 to 7 */
    uint8_t tos;
    uint8_t hop_limit;
    uint8_t reserved[3];
};

/* Options of a listener, with those that connections do not have. 0 takes the default. */
struct ginnel_listen_options {
    size_t size; /* sizeof(struct ginnel_listen_options) */
    struct ginnel_socket_options socket;
    uint32_t fastopen_queue; /* connections of SYNs with data, at most, until their handshake ends; 0: none */
    uint32_t defer_accept_s; /* seconds for which a connection waits for its first data (TCP_DEFER_ACCEPT) */
    uint8_t fastopen_key[16];        /* of cookies (TCP_FASTOPEN_KEY); 0: tcp.fastopen_key */
    uint8_t fastopen_backup_key[16]; /* whose cookies are accepted, too */
    uint32_t rto_min_us;             /* as GINNEL_OPT_RTO_MIN_US, from the SYN+ACK on */
    uint32_t rto_max_ms;
    uint32_t delayed_ack_max_us;
    uint8_t min_ttl;       /* IPv4 segments with a smaller TTL are dropped, also SYNs (IP_MINTTL) */
    uint8_t min_hop_count; /* IPv6 segments with a smaller hop limit are dropped (IPV6_MINHOPCOUNT) */
    uint8_t save_syn;      /* GINNEL_SAVE_SYN_…: ginnel_conn_saved_syn() */
    uint8_t reserved;
};

/* The headers of SYNs that are saved (TCP_SAVE_SYN). */
enum ginnel_save_syn {
    GINNEL_SAVE_SYN_PACKET = 1, /* IP and TCP */
    GINNEL_SAVE_SYN_FRAME = 2,  /* the link, IP and TCP */
};

/* Listens on all shards of the stack; each that calls this for the address gets its own handle. options may
 * be NULL. */
int ginnel_listen(const struct sockaddr *address, socklen_t len, const struct ginnel_socket_options *options,
                  struct ginnel_listener *out);
/* As ginnel_listen(). SYNs with data (fast open, RFC 7413) are accepted if the configuration permits that
 * (tcp.fastopen with the bit 2). EINVAL: a size of the structure that this library does not know, or a backup
 * key without a key. */
int ginnel_listen_with(const struct sockaddr *address, socklen_t len,
                       const struct ginnel_listen_options *options, struct ginnel_listener *out);
/* Stops listening. Connections in the accept queue are reset. */
int ginnel_unlisten(struct ginnel_listener listener);
/* Takes a connection from the accept queue, in a loop of the program's own. EAGAIN: none waits. */
int ginnel_accept(struct ginnel_listener listener, struct ginnel_conn *out);
/* Opens a connection: connected or closed follows. local and options may be NULL. */
int ginnel_connect(const struct sockaddr *remote, socklen_t remote_len, const struct sockaddr *local,
                   socklen_t local_len, const struct ginnel_socket_options *options, struct ginnel_conn *out);

/* Opens a connection fast (RFC 7413), unless tcp.fastopen forbids it: the SYN carries the first of the data
 * if the peer has given a cookie before, and asks for one otherwise. Returns how many bytes were queued, as
 * ginnel_send() does; send the others with that. */
ssize_t ginnel_connect_with_data(const struct sockaddr *remote, socklen_t remote_len,
                                 const struct sockaddr *local, socklen_t local_len,
                                 const struct ginnel_socket_options *options, const void *data, size_t len,
                                 struct ginnel_conn *out);

/* Queues a copy of bytes. Returns how many found room, or 0 for none: after fewer than len, the connection
 * becomes writable (the callback writable, or GINNEL_EV_WRITABLE). EPIPE: the write side is closed. */
ssize_t ginnel_send(struct ginnel_conn conn, const void *data, size_t len);

/* Writes len bytes of what is sent to out, the first of which is byte offset. It may be asked for bytes that
 * are not queued in the end: only those that ginnel_send_fill() returns are. Calls of this API fail
 * meanwhile. */
typedef void (*ginnel_fill)(void *arg, size_t offset, uint8_t *out, size_t len);
/* As ginnel_send(), but fill writes the bytes into the stack's send buffer. */
ssize_t ginnel_send_fill(struct ginnel_conn conn, size_t len, ginnel_fill fill, void *arg);

/* As ginnel_send(); the last byte that is queued is urgent (MSG_OOB). */
ssize_t ginnel_send_urgent(struct ginnel_conn conn, const void *data, size_t len);
/* Takes the urgent byte out of band, and returns it: 0 to 255. ginnel_recv() and ginnel_peek() stop before
 * its place, and what they return next begins after it. EAGAIN: none has arrived, GINNEL_OPT_OOBINLINE leaves
 * it in the stream, or bytes after it were received or consumed: at GINNEL_EV_URGENT take it before them. */
int ginnel_recv_urgent(struct ginnel_conn conn);

/* Queues a message before all queued messages of lower priority of which no byte was sent. All or nothing:
 * EAGAIN, and the connection becomes writable. EMSGSIZE: it never fits. */
int ginnel_send_message(struct ginnel_conn conn, const void *data, size_t len, uint8_t priority);

/* Tells that nothing reads the memory of a source any more. Calls of this API may fail meanwhile. */
typedef void (*ginnel_release)(void *arg, const void *data, size_t len);
/* Registers memory that is sent without a copy. It must not change until release is called, or ever if that
 * is NULL. */
int ginnel_source_add(const void *data, size_t len, ginnel_release release, void *arg,
                      struct ginnel_source *out);
/* Queues len bytes of a source from offset on. All or nothing, as ginnel_send_message(). */
int ginnel_send_source(struct ginnel_conn conn, struct ginnel_source source, uint64_t offset, uint64_t len);
/* Releases a source. What is queued of it is still sent; then release is called. */
int ginnel_source_release(struct ginnel_source source);

/* Receive bytes, in a loop of the program's own. Return their number. 0: the end of the stream. EAGAIN:
 * nothing yet. ginnel_recv_unordered() receives bytes above best effort that arrived early
 * (GINNEL_UNORDERED), and writes to ahead how many bytes of the stream before them were not received. */
ssize_t ginnel_recv(struct ginnel_conn conn, void *buffer, size_t len);
ssize_t ginnel_recv_unordered(struct ginnel_conn conn, void *buffer, size_t len, size_t *ahead);
/* Lends received bytes where they are, without a copy, in a loop of the program's own: those from offset on,
 * counted from the first one that was not consumed. Writes the address of the first byte, or NULL, to data,
 * and returns how many bytes are contiguous there. What has arrived may lie in several pieces: the next one
 * begins at the offset at which this one ends, and all of them may be used at once. 0: the end of the stream.
 * EAGAIN: nothing yet, or no more from offset on. Bytes after an urgent one are lent when those before it
 * were consumed, so peek at offset 0 until EAGAIN before you wait for the next event.
 * The bytes belong to the stack and must not be written. They may be read until the next ginnel_wait() or
 * ginnel_leave(), or a call that consumes or receives bytes of this connection, closes it or aborts it. Bytes
 * that were not consumed are lent again afterwards. */
ssize_t ginnel_peek(struct ginnel_conn conn, size_t offset, const uint8_t **data);
/* Consumes the first count of the bytes that ginnel_peek() lends, and opens the window for as many others.
 * EINVAL: there are fewer, and none is consumed. */
int ginnel_consume(struct ginnel_conn conn, size_t count);
/* Returns how many bytes have arrived and were not received, with an urgent one and those after it. */
ssize_t ginnel_unread(struct ginnel_conn conn);
/* Passes bytes that data has left again, after this callback. */
int ginnel_resume(struct ginnel_conn conn);

/* Sends FIN after what is queued; receiving goes on. */
int ginnel_shutdown(struct ginnel_conn conn);
/* Closes both directions; what is queued is still sent. Unread bytes reset the connection, as on Linux. */
int ginnel_conn_close(struct ginnel_conn conn);
/* Resets the connection. */
int ginnel_conn_abort(struct ginnel_conn conn);

enum ginnel_option {
    GINNEL_OPT_NODELAY = 1,
    GINNEL_OPT_CORK = 2,
    GINNEL_OPT_MORE = 3,
    GINNEL_OPT_QUICKACK = 4,
    GINNEL_OPT_KEEPALIVE = 5,
    GINNEL_OPT_KEEPIDLE_S = 6,
    GINNEL_OPT_KEEPINTVL_S = 7,
    GINNEL_OPT_KEEPCNT = 8,
    GINNEL_OPT_USER_TIMEOUT_MS = 9,
    GINNEL_OPT_LINGER_ZERO = 10,
    GINNEL_OPT_OOBINLINE = 11,
    GINNEL_OPT_ACK_EVENTS = 12,
    GINNEL_OPT_RCVBUF = 13,
    GINNEL_OPT_SNDBUF = 14,
    GINNEL_OPT_NOTSENT_LOWAT = 15,
    GINNEL_OPT_MAXSEG = 16,
    GINNEL_OPT_TOS = 17,
    GINNEL_OPT_HOP_LIMIT = 18,
    GINNEL_OPT_PRIORITY = 19,
    GINNEL_OPT_UNORDERED = 20,
    GINNEL_OPT_MIN_HOP_LIMIT = 21,   /* Segments with a smaller one are dropped; 0: none. */
    GINNEL_OPT_RTO_MIN_US = 22,      /* 1,000 to 200,000 */
    GINNEL_OPT_RTO_MAX_MS = 23,      /* 1,000 to 120,000 */
    GINNEL_OPT_DELACK_MAX_US = 24,   /* 1,000 to 200,000 */
    GINNEL_OPT_SYNCNT = 25,          /* 1 to 127 */
    GINNEL_OPT_LINGER2_S = 26,       /* 1 to 32,767 */
    GINNEL_OPT_MAX_PACING_RATE = 27, /* in bytes a second; 0: no limit */
    GINNEL_OPT_MAY_FRAGMENT = 28,
    GINNEL_OPT_CONGESTION = 29, /* GINNEL_CONGESTION_… */
};

enum ginnel_congestion {
    GINNEL_CONGESTION_CUBIC = 0,
    GINNEL_CONGESTION_NEWRENO = 1,
    GINNEL_CONGESTION_BBR = 2,
};

/* Sets an option. Names end in the unit of the value (_S, _MS, _US); RCVBUF, SNDBUF, NOTSENT_LOWAT and
 * MAXSEG are in bytes, and switches take 0 (off) or another number (on). The options that have no comment
 * mean what the socket option of the same name does; KEEPIDLE and KEEPINTVL are 1 to 32,767, KEEPCNT is 1 to
 * 127, PRIORITY 0 to 7, and the two ECN bits of TOS must be 0. EINVAL: out of range. ENOPROTOOPT: no such
 * option. */
int ginnel_conn_set_option(struct ginnel_conn conn, int option, int64_t value);
/* Copies the headers of the SYN that began a connection, and discards them. Returns their length: if that is
 * more than len, nothing was copied, and they are kept. 0: none are saved, or the program has a thread of its
 * own (shard.placement, shard.workers). */
ssize_t ginnel_conn_saved_syn(struct ginnel_conn conn, void *buffer, size_t len);
/* Set and read a number of the program, which events of the connection carry; 0 at first. */
int ginnel_conn_set_token(struct ginnel_conn conn, uint32_t token);
int ginnel_conn_token(struct ginnel_conn conn, uint32_t *token);

struct ginnel_info {
    struct sockaddr_storage local;
    struct sockaddr_storage remote;
    uint64_t rtt_ns;    /* smoothed round-trip time */
    uint64_t rttvar_ns; /* its mean deviation */
    uint64_t min_rtt_ns;
    uint32_t send_queued;       /* bytes queued and not acknowledged */
    uint32_t recv_queued;       /* bytes that can be received */
    uint32_t unsent;            /* bytes queued and not sent */
    uint32_t mss;               /* of sent segments, in bytes */
    uint32_t congestion_window; /* in segments */
    uint32_t unacked_segments;
    uint32_t retransmits; /* segments sent again, as tcpi_total_retrans */
    uint32_t state;       /* TCP_ESTABLISHED, … of netinet/tcp.h */
};

/* Describes a connection. */
int ginnel_conn_info(struct ginnel_conn conn, struct ginnel_info *info);

/* ---- UDP ---- */

enum {
    GINNEL_UDP_REUSE_PORT = 1 << 0,
    GINNEL_UDP_V6_ONLY = 1 << 1,
    GINNEL_UDP_BROADCAST = 1 << 2,
    GINNEL_UDP_REUSE_ADDRESS = 1 << 3,
    GINNEL_UDP_GRO = 1 << 4,        /* Datagrams of one sender and length may be received as one: gso_size. */
    GINNEL_UDP_RECVERR_V4 = 1 << 5, /* Errors over IPv4 are queued: ginnel_udp_recv_error(). */
    GINNEL_UDP_RECVERR_V6 = 1 << 6, /* Errors over IPv6 are queued. */
};

/* What happens to datagrams that exceed the path MTU, as IP_MTU_DISCOVER says, but with other numbers. */
enum ginnel_pmtu_discovery {
    GINNEL_PMTU_WANT = 0,      /* They are fragmented here, but not by routers. */
    GINNEL_PMTU_DONT = 1,      /* They are fragmented here or by routers. */
    GINNEL_PMTU_DO = 2,        /* EMSGSIZE. */
    GINNEL_PMTU_PROBE = 3,     /* They are sent, up to the MTU of the link; beyond it EMSGSIZE. */
    GINNEL_PMTU_INTERFACE = 4, /* As GINNEL_PMTU_PROBE, but routers may fragment. */
    GINNEL_PMTU_OMIT = 5,      /* As GINNEL_PMTU_INTERFACE, but fragmented here beyond the MTU of the link. */
};

enum {
    GINNEL_MULTICAST_NO_LOOP = 1 << 0,      /* Members on this host do not get what the socket sends. */
    GINNEL_MULTICAST_MEMBERS_ONLY = 1 << 1, /* Receives only groups that the socket itself has joined. */
    GINNEL_MULTICAST_THIS_HOST = 1 << 2,    /* Hop limit 0: datagrams do not leave this host. */
};

/* Options about the groups of one address family. 0 takes the default. */
struct ginnel_multicast_options {
    uint32_t source;   /* IPv4: address of datagrams of a socket bound to none, as s_addr of in_addr */
    uint16_t link;     /* by which datagrams leave: number in the configuration, from 1; 0: the route says */
    uint8_t hop_limit; /* default 1 */
    uint8_t flags;     /* GINNEL_MULTICAST_… */
};

/* Options of a socket. 0 takes the default. */
struct ginnel_udp_options {
    uint32_t flags; /* GINNEL_UDP_… */
    uint32_t recv_buffer_bytes;
    uint8_t priority; /* 0 to 7 */
    uint8_t tos;
    uint8_t hop_limit;
    uint8_t pmtu_discovery; /* GINNEL_PMTU_… */
    uint8_t reserved[4];
    struct ginnel_multicast_options multicast_v4;
    struct ginnel_multicast_options multicast_v6;
};

/* Opens a socket; port 0 lets the stack choose one. */
int ginnel_udp_bind(const struct sockaddr *local, socklen_t len, uint32_t flags, struct ginnel_udp *out);
/* Sets the peer: ginnel_udp_send() without remote sends to it, and only its datagrams are received. */
int ginnel_udp_connect(struct ginnel_udp socket, const struct sockaddr *remote, socklen_t len);
/* Replaces all options of a socket, also those that ginnel_udp_bind() has set. GINNEL_UDP_REUSE_PORT and
 * GINNEL_UDP_REUSE_ADDRESS concern sockets that are bound later, GINNEL_UDP_V6_ONLY has no effect any more.
 * EINVAL: out of range. */
int ginnel_udp_set_options(struct ginnel_udp socket, const struct ginnel_udp_options *options);

enum {
    GINNEL_SOURCES_EXCLUDE = 0, /* All sources but the listed ones: without any, all. */
    GINNEL_SOURCES_INCLUDE = 1, /* The listed sources: without any, the socket leaves the group. */
};

/* Sets which sources of a multicast group the socket receives on a link, as setsourcefilter() of RFC 3678.
 * link is the number of a [[link]] of the configuration, from 1, or 0 for the one by which the group is
 * reached (ENODEV: none, or the program has a thread of its own). The ports of group and sources do not
 * matter. EINVAL: there is no link of this number, or the kernel receives its groups; group is no multicast
 * address; or a source is of another family. ENOBUFS: network.igmp_max_memberships or igmp_max_msf (IPv6:
 * mld_…), or network.group_memberships_max is reached. */
int ginnel_udp_set_membership(struct ginnel_udp socket, unsigned link, const struct sockaddr *group,
                              socklen_t group_len, unsigned mode, const struct sockaddr_storage *sources,
                              size_t count);

/* Sends a datagram to remote (NULL: the connected peer) from source (NULL: the stack chooses). For an answer,
 * pass to of the received datagram as source, so that the answer comes from the address that was asked. */
int ginnel_udp_send(struct ginnel_udp socket, const void *data, size_t data_len,
                    const struct sockaddr *remote, socklen_t remote_len, const struct sockaddr *source,
                    socklen_t source_len);
/* Sends the datagrams that are concatenated in data: segment_len bytes each, the last of which may be
 * shorter. A device with segmentation offload gets them in one piece; of another one that becomes full after
 * the first, the others are lost. EMSGSIZE: they are more than 128, one exceeds the path MTU, or all of them
 * together exceed the largest datagram. EINVAL: segment_len is 0 or more than 65,535. */
int ginnel_udp_send_segments(struct ginnel_udp socket, const void *data, size_t data_len, size_t segment_len,
                             const struct sockaddr *remote, socklen_t remote_len,
                             const struct sockaddr *source, socklen_t source_len);
/* Returns the bytes of the largest IP packet that reaches the connected peer without fragmentation, as far as
 * known. EDESTADDRREQ: the socket is not connected. */
int ginnel_udp_path_mtu(struct ginnel_udp socket);
/* Receives a datagram, in a loop of the program's own. A pending error is returned first. datagram may be
 * NULL. */
ssize_t ginnel_udp_recv(struct ginnel_udp socket, void *buffer, size_t len, struct ginnel_datagram *datagram);

/* An entry of the error queue. */
struct ginnel_udp_error {
    struct sockaddr_storage destination; /* of the datagram */
    struct sockaddr_storage offender;    /* sender of the ICMP message; ss_family 0: this stack */
    size_t len;                          /* known bytes of the datagram, also if fewer were written */
    int32_t error;                       /* the error number */
    int32_t next_error;                  /* that of the next entry, if an ICMP message caused it, or 0 */
    uint32_t info;                       /* EMSGSIZE: bytes of the largest packet that would have fitted */
    int32_t extensions;                  /* offset of extensions (RFC 4884) in the known bytes; -1: none */
    uint8_t icmp_type;
    uint8_t icmp_code;
    uint8_t has_more;           /* 1: more entries */
    uint8_t extensions_invalid; /* 1: their checksum is wrong, or they are cut off */
    uint8_t reserved[4];
};

/* Takes the oldest entry of the error queue (GINNEL_UDP_RECVERR_V4), and as much of the datagram as is known
 * and fits into buffer. Returns the number of bytes written. The latest error that an ICMP message caused is
 * also returned by the next call that receives, or that sends, which sends nothing then, or passed to
 * datagram_error. EAGAIN: no entry. */
ssize_t ginnel_udp_recv_error(struct ginnel_udp socket, void *buffer, size_t len,
                              struct ginnel_udp_error *error);
/* Reads the local address of a socket, with the port that the stack chose for port 0. */
int ginnel_udp_local(struct ginnel_udp socket, struct sockaddr_storage *address);
/* Closes a socket. Datagrams that were not received are lost. */
int ginnel_udp_close(struct ginnel_udp socket);

/* ---- Timers, kernel descriptors, the shard ---- */

/* Sets a timer that expires once, after_ns nanoseconds from now, rounded up by 66 µs at most. out may be
 * NULL. ENOBUFS: shard.timers_max (1,000,000 by default) timers are set. */
int ginnel_timer_set(uint64_t after_ns, uint64_t token, struct ginnel_timer *out);
/* Sets a timer that expires once, in the first turn that begins at at_ns or later: nanoseconds of
 * CLOCK_MONOTONIC, without rounding. Shortly before, the shard polls instead of sleeping, unless
 * shard.placement is paired. out may be NULL. ENOBUFS: as above. */
int ginnel_timer_set_exact(uint64_t at_ns, uint64_t token, struct ginnel_timer *out);
/* Cancels a timer. EBADF: it has expired, or was cancelled. */
int ginnel_timer_cancel(struct ginnel_timer timer);

enum {
    GINNEL_FD_READ = 1 << 0,
    GINNEL_FD_WRITE = 1 << 1,
    GINNEL_FD_EDGES = 1 << 2, /* Reports a state when it begins, not as long as it lasts. */
};

/* Watches a non-blocking kernel descriptor for interests (GINNEL_FD_…). Remove it before you close it.
 * EINVAL: an unknown interest. */
int ginnel_fd_add(int fd, uint32_t interests, uint64_t token, struct ginnel_fd *out);
/* Changes what is watched. EBADF: the descriptor is not watched. */
int ginnel_fd_modify(struct ginnel_fd fd, uint32_t interests);
/* Stops watching a descriptor, which stays open. EBADF: as above. */
int ginnel_fd_remove(struct ginnel_fd fd);

/* Returns the class of the frames whose event is being delivered, as class_ of struct ginnel_event. */
int ginnel_class(void);
/* Returns the index of the shard. */
int ginnel_shard(void);
/* Returns the index of the worker (shard.workers) that runs this callback, or 0. */
int ginnel_worker(void);
/* Returns 1 if the shard serves the device of a local address, whose port does not matter, and 0 otherwise.
 * It serves all unless devices have shards of their own (device.shards). */
int ginnel_serves(const struct sockaddr *local, socklen_t len);
/* Reads a random number that others cannot predict. */
int ginnel_random(uint64_t *number);
/* Reads a counter of the shard, by its name in docs/statistics.md: "shard.…", "tcp.…", "ip.…" or "drop.…".
 * Compares the name with all others of its group. ENOENT: no such counter. */
int ginnel_counter(const char *name, uint64_t *value);
/* Reads the time of the current burst: nanoseconds of CLOCK_MONOTONIC. */
int ginnel_now(uint64_t *nanos);
/* Ends the shard of this callback after the current turn. Close connections first. EPERM: no callback is
 * running; ginnel_leave() ends the shard of a loop. */
int ginnel_exit(void);

#ifdef __cplusplus
}
#endif

#endif
