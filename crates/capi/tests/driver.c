/* Cases of tests/driver.rs: each is a stack whose loopback is inside it, and both ends of its connections. */
#include <arpa/inet.h>
#include <errno.h>
#include <ginnel.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CHECK(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "line %d: %s (%s)\n", __LINE__, #condition, ginnel_error()); \
            exit(1); \
        } \
    } while (0)
#define IS(value, expected) \
    do { \
        long long value_ = (long long)(value); \
        if (value_ != (long long)(expected)) { \
            fprintf(stderr, "line %d: %s is %lld, not %s (%s)\n", __LINE__, #value, value_, #expected, \
                    ginnel_error()); \
            exit(1); \
        } \
    } while (0)

enum { ROOM = 32, PORT = 7 };

static const char *const CONFIGURATION = "loopback = \"stack\"\nrun.directory = false\nshard.spin_us = 0\n";

static struct sockaddr_in address(uint16_t port)
{
    struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(port) };
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return address;
}

#define ADDRESS(port) (struct sockaddr *)&(struct sockaddr_in[]){ address(port) }, sizeof(struct sockaddr_in)

/* ---- A shard with a loop ---- */

static struct ginnel_config *config;
static struct ginnel_stack *stack;
static struct ginnel_event high_room[ROOM], low_room[ROOM];
static struct ginnel_events high = { high_room, ROOM, 0 }, low = { low_room, ROOM, 0 };

/* Opens a shard with more lines of configuration. */
static void open_configured(const char *lines, ginnel_classifier classifier, void *arg,
                            struct ginnel_stop *stop)
{
    char text[300];
    snprintf(text, sizeof(text), "%s%s", CONFIGURATION, lines);
    IS(ginnel_config_text(text, &config), 0);
    IS(ginnel_config_classifier(config, classifier, arg), 0);
    IS(ginnel_open(config, &stack), 0);
    ginnel_config_free(config);
    IS(ginnel_shards(stack), 1);
    IS(ginnel_enter(stack, 0, stop), 0);
}

static void open_shard(ginnel_classifier classifier, void *arg, struct ginnel_stop *stop)
{
    open_configured("", classifier, arg, stop);
}

static void close_shard(void)
{
    IS(ginnel_leave(), 0);
    ginnel_close(stack);
}

/* Returns the event of the list that has one of these bits, or NULL. */
static struct ginnel_event *find(struct ginnel_events *list, uint32_t events)
{
    for (size_t i = 0; i < list->count; i++)
        if (list->events[i].events & events)
            return &list->events[i];
    return NULL;
}

/* Waits until an event with one of these bits is in low. Other events are passed over. */
static struct ginnel_event expect(uint32_t events)
{
    for (int i = 0; i < 1000; i++) {
        CHECK(ginnel_wait(NULL, &low, 5000) > 0);
        struct ginnel_event *found = find(&low, events);
        if (found)
            return *found;
    }
    fprintf(stderr, "no event %x\n", events);
    exit(1);
}

/* Opens a connection to a listener of this shard. */
static void open_pair(struct ginnel_listener listener, uint16_t port, struct ginnel_conn *client,
                      struct ginnel_conn *server)
{
    IS(ginnel_connect(ADDRESS(port), NULL, 0, NULL, client), 0);
    int connected = 0, accepted = 0;
    while (!connected || !accepted) {
        CHECK(ginnel_wait(NULL, &low, 5000) > 0);
        for (size_t i = 0; i < low.count; i++) {
            struct ginnel_event *event = &low.events[i];
            if (event->events & GINNEL_EV_CONNECTED) {
                IS(event->source, client->id);
                connected = 1;
            }
            if (event->events & GINNEL_EV_INCOMING) {
                IS(event->source, listener.id);
                IS(ginnel_accept(listener, server), 0);
                accepted = 1;
            }
        }
    }
    IS(ginnel_accept(listener, server), -EAGAIN);
}

static void receive(struct ginnel_conn conn, char *buffer, size_t len)
{
    for (size_t got = 0; got < len;) {
        ssize_t more = ginnel_recv(conn, buffer + got, len - got);
        if (more == -EAGAIN)
            CHECK(ginnel_wait(NULL, &low, 5000) >= 0);
        else {
            CHECK(more > 0);
            got += (size_t)more;
        }
    }
}

static void loop_carries_bytes(void)
{
    struct ginnel_listener listener;
    struct ginnel_conn client, server;
    struct ginnel_info info;
    char buffer[100];
    uint32_t token;
    open_shard(NULL, NULL, NULL);
    IS(ginnel_listen(ADDRESS(PORT), NULL, &listener), 0);
    IS(ginnel_wait(NULL, &low, 0), 0);
    open_pair(listener, PORT, &client, &server);
    IS(ginnel_recv(server, buffer, sizeof(buffer)), -EAGAIN);
    IS(ginnel_conn_set_token(server, 77), 0);
    IS(ginnel_send(client, "hello", 5), 5);
    struct ginnel_event event = expect(GINNEL_EV_READABLE);
    IS(event.source, server.id);
    IS(event.token, 77);
    IS(ginnel_unread(server), 5);
    IS(ginnel_recv(server, buffer, sizeof(buffer)), 5);
    CHECK(memcmp(buffer, "hello", 5) == 0);
    IS(ginnel_conn_info(server, &info), 0);
    IS(info.state, TCP_ESTABLISHED);
    IS(((struct sockaddr_in *)&info.local)->sin_port, htons(PORT));
    IS(((struct sockaddr_in *)&info.local)->sin_addr.s_addr, htonl(INADDR_LOOPBACK));
    /* Unread bytes before a FIN are received first. */
    IS(ginnel_send(client, "bye", 3), 3);
    IS(ginnel_shutdown(client), 0);
    IS(expect(GINNEL_EV_PEER_CLOSED).source, server.id);
    IS(ginnel_send(client, "x", 1), -EPIPE);
    IS(ginnel_recv(server, buffer, 2), 2);
    IS(ginnel_recv(server, buffer, 2), 1);
    IS(ginnel_recv(server, buffer, 2), 0);
    IS(ginnel_conn_close(server), 0);
    IS(ginnel_conn_close(client), 0);
    for (int i = 0; i < 2; i++) {
        event = expect(GINNEL_EV_CLOSED);
        IS(event.error, 0);
    }
    IS(ginnel_recv(server, buffer, 2), -EBADF);
    IS(ginnel_recv(client, buffer, 2), -EBADF);
    IS(ginnel_conn_token(server, &token), -EBADF);
    /* Nobody listens any more. */
    IS(ginnel_unlisten(listener), 0);
    IS(ginnel_unlisten(listener), -EBADF);
    IS(ginnel_connect(ADDRESS(PORT), NULL, 0, NULL, &client), 0);
    do
        event = expect(GINNEL_EV_CLOSED);
    while (event.source != client.id);
    IS(event.error, ECONNREFUSED);
    close_shard();
}

/* The peer answers and closes in the same moment, when this side has sent its FIN. */
static void bytes_before_the_end_are_received(void)
{
    struct ginnel_listener listener;
    struct ginnel_conn client, server, other;
    char buffer[100];
    open_shard(NULL, NULL, NULL);
    IS(ginnel_listen(ADDRESS(PORT), NULL, &listener), 0);
    for (int variant = 0; variant < 6; variant++) {
        int reset = variant >= 3, error = reset ? ECONNRESET : variant == 2 ? ECANCELED : 0;
        open_pair(listener, PORT, &client, &server);
        IS(ginnel_conn_set_token(client, 5), 0);
        IS(ginnel_shutdown(client), 0);
        IS(expect(GINNEL_EV_PEER_CLOSED).source, server.id);
        IS(ginnel_send(server, "late bytes", 10), 10);
        IS(reset ? ginnel_conn_abort(server) : ginnel_conn_close(server), 0);
        struct ginnel_event event = expect(GINNEL_EV_READABLE);
        IS(event.source, client.id);
        IS(event.token, 5);
        /* The end waits for the bytes, and other connections do not. */
        open_pair(listener, PORT, &other, &server);
        IS(ginnel_unread(client), 10);
        if (variant % 3 == 0) {
            IS(ginnel_recv(client, buffer, 4), 4);
            IS(ginnel_recv(client, buffer + 4, 90), 6);
            CHECK(memcmp(buffer, "late bytes", 10) == 0);
            IS(ginnel_recv(client, buffer, 100), reset ? -ECONNRESET : 0);
        } else if (variant % 3 == 1)
            IS(ginnel_conn_close(client), 0);
        else
            IS(ginnel_conn_abort(client), 0);
        do
            event = expect(GINNEL_EV_CLOSED);
        while (event.source != client.id);
        IS(event.token, 5);
        IS(event.error, error);
        IS(ginnel_recv(client, buffer, 100), -EBADF);
        IS(ginnel_conn_close(client), -EBADF);
        IS(ginnel_conn_abort(other), 0);
        IS(expect(GINNEL_EV_CLOSED).source == client.id, 0);
    }
    close_shard();
}

static void large_transfer_needs_all_events(void)
{
    enum { BYTES = 20 << 20 };
    struct ginnel_listener listener;
    struct ginnel_conn client, server;
    char *sent = malloc(BYTES), *got = malloc(BYTES);
    for (size_t i = 0; i < BYTES; i++)
        sent[i] = (char)(i * 31 >> 5);
    open_shard(NULL, NULL, NULL);
    IS(ginnel_listen(ADDRESS(PORT), NULL, &listener), 0);
    open_pair(listener, PORT, &client, &server);
    size_t queued = 0, received = 0;
    int readable = 0, writable = 1, short_sends = 0;
    while (received < BYTES) {
        while (writable && queued < BYTES) {
            ssize_t now = ginnel_send(client, sent + queued, BYTES - queued);
            CHECK(now >= 0);
            queued += (size_t)now;
            writable = queued == BYTES;
            short_sends += queued < BYTES;
        }
        while (readable) {
            ssize_t now = ginnel_recv(server, got + received, BYTES - received);
            readable = now > 0;
            if (now > 0)
                received += (size_t)now;
            else if (received < BYTES)
                IS(now, -EAGAIN);
        }
        if (received == BYTES)
            break;
        CHECK(ginnel_wait(NULL, &low, 5000) > 0);
        for (size_t i = 0; i < low.count; i++) {
            readable |= low.events[i].source == server.id && low.events[i].events & GINNEL_EV_READABLE;
            writable |= low.events[i].source == client.id && low.events[i].events & GINNEL_EV_WRITABLE;
        }
    }
    CHECK(short_sends > 0);
    CHECK(memcmp(sent, got, BYTES) == 0);
    close_shard();
    free(sent);
    free(got);
}

static uint8_t exclamations(void *arg, const struct ginnel_packet *packet, uint8_t usual)
{
    ++*(int *)arg;
    CHECK(packet->frame && packet->frame_len > packet->payload_len);
    return packet->payload_len > 0 && packet->payload[0] == '!' ? 6 : usual;
}

static void urgent_events_are_in_their_own_list(void)
{
    struct ginnel_listener listener;
    struct ginnel_conn client[2], server[2];
    char buffer[10];
    int calls = 0;
    open_shard(exclamations, &calls, NULL);
    IS(ginnel_listen(ADDRESS(PORT), NULL, &listener), 0);
    for (int i = 0; i < 2; i++)
        open_pair(listener, PORT, &client[i], &server[i]);
    CHECK(calls > 0);
    IS(ginnel_send(client[0], "usual", 5), 5);
    IS(ginnel_send(client[1], "!urgent", 7), 7);
    uint64_t in_high = 0, in_low = 0;
    while (!in_high || !in_low) {
        CHECK(ginnel_wait(&high, &low, 5000) > 0);
        struct ginnel_event *event = find(&high, GINNEL_EV_READABLE);
        if (event) {
            in_high = event->source;
            IS(event->class_, 6);
        }
        event = find(&low, GINNEL_EV_READABLE);
        if (event) {
            CHECK(in_high);
            in_low = event->source;
            IS(event->class_, 1);
        }
    }
    IS(in_high, server[1].id);
    IS(in_low, server[0].id);
    IS(ginnel_recv(server[1], buffer, sizeof(buffer)), 7);
    /* Without a list for urgent events they come first in the other. */
    struct ginnel_events one = { low_room, 1, 0 };
    IS(ginnel_send(client[0], "usual", 5), 5);
    IS(ginnel_send(client[1], "!urgent", 7), 7);
    IS(ginnel_wait(NULL, &one, 5000), 1);
    IS(one.events[0].source, server[1].id);
    IS(ginnel_wait(NULL, &one, 5000), 1);
    IS(one.events[0].source, server[0].id);
    close_shard();
}

/* ---- Receive in place ---- */

static void bytes_are_lent_until_they_are_consumed(void)
{
    enum { BYTES = 5000 };
    struct ginnel_listener listener;
    struct ginnel_conn client[2], server[2];
    static uint8_t sent[BYTES], got[BYTES];
    const uint8_t *first, *again, *pieces[BYTES];
    size_t lens[BYTES], count = 0, total = 0;
    int calls = 0;
    for (size_t i = 0; i < BYTES; i++)
        sent[i] = (uint8_t)(i % 251);
    open_shard(exclamations, &calls, NULL);
    IS(ginnel_listen(ADDRESS(PORT), NULL, &listener), 0);
    for (int i = 0; i < 2; i++)
        open_pair(listener, PORT, &client[i], &server[i]);
    first = sent;
    IS(ginnel_peek(server[0], 0, &first), -EAGAIN);
    CHECK(first == NULL);
    IS(ginnel_consume(server[0], 0), 0);
    IS(ginnel_consume(server[0], 1), -EINVAL);
    IS(ginnel_send(client[0], sent, BYTES), BYTES);
    IS(expect(GINNEL_EV_READABLE).source, server[0].id);
    /* All pieces are lent at once. */
    for (; total < BYTES; total += lens[count++]) {
        ssize_t len = ginnel_peek(server[0], total, &pieces[count]);
        CHECK(len > 0 && total + (size_t)len <= BYTES);
        lens[count] = (size_t)len;
    }
    CHECK(count > 1);
    IS(ginnel_peek(server[0], BYTES, &again), -EAGAIN);
    IS(ginnel_peek(server[0], SIZE_MAX, &again), -EAGAIN);
    CHECK(again == NULL);
    total = 0;
    for (size_t i = 0; i < count; total += lens[i++])
        CHECK(memcmp(pieces[i], sent + total, lens[i]) == 0);
    /* They are not copied: what is not consumed stays where it is, also when more arrives. */
    first = pieces[0];
    IS(ginnel_send(client[0], "more", 4), 4);
    IS(ginnel_send(client[1], "!urgent", 7), 7);
    while (ginnel_unread(server[1]) == 0 || ginnel_unread(server[0]) != BYTES + 4)
        CHECK(ginnel_wait(&high, &low, 5000) >= 0);
    IS(ginnel_peek(server[0], 0, &again), lens[0]);
    CHECK(again == first);
    IS(ginnel_peek(server[0], 100, &again), lens[0] - 100);
    CHECK(again == first + 100);
    IS(ginnel_consume(server[0], 100), 0);
    IS(ginnel_peek(server[0], 0, &again), lens[0] - 100);
    CHECK(again == first + 100);
    /* More than is there is an error, and changes nothing. */
    IS(ginnel_consume(server[0], BYTES + 4 - 99), -EINVAL);
    IS(ginnel_consume(server[0], SIZE_MAX), -EINVAL);
    IS(ginnel_unread(server[0]), BYTES + 4 - 100);
    IS(ginnel_peek(server[0], 0, &again), lens[0] - 100);
    CHECK(again == first + 100);
    /* Other connections are not concerned. */
    IS(ginnel_peek(server[1], 0, &again), 7);
    CHECK(memcmp(again, "!urgent", 7) == 0);
    IS(ginnel_consume(server[1], 7), 0);
    IS(ginnel_peek(server[1], 0, &again), -EAGAIN);
    /* The first piece ends within what is consumed; ginnel_recv() goes on after it. */
    IS(ginnel_consume(server[0], lens[0]), 0);
    IS(ginnel_peek(server[0], 0, &again), lens[1] - 100);
    CHECK(again == pieces[1] + 100);
    IS(ginnel_recv(server[0], got, 50), 50);
    CHECK(memcmp(got, sent + lens[0] + 100, 50) == 0);
    IS(ginnel_peek(server[0], 0, &again), lens[1] - 150);
    IS(*again, sent[lens[0] + 150]);
    IS(ginnel_consume(server[0], BYTES + 4 - lens[0] - 150), 0);
    IS(ginnel_peek(server[0], 0, &again), -EAGAIN);
    /* The end of the stream. */
    IS(ginnel_send(client[0], "bye", 3), 3);
    IS(ginnel_shutdown(client[0]), 0);
    IS(expect(GINNEL_EV_PEER_CLOSED).source, server[0].id);
    IS(ginnel_peek(server[0], 0, &again), 3);
    IS(ginnel_peek(server[0], 3, &again), -EAGAIN);
    IS(ginnel_consume(server[0], 3), 0);
    IS(ginnel_peek(server[0], 0, &again), 0);
    CHECK(again == NULL);
    IS(ginnel_consume(server[0], 1), -EINVAL);
    /* After the close, with bytes that are lent. */
    IS(ginnel_send(client[1], "!lost", 5), 5);
    IS(expect(GINNEL_EV_READABLE).source, server[1].id);
    IS(ginnel_peek(server[1], 0, &again), 5);
    IS(ginnel_conn_close(server[1]), 0);
    while (expect(GINNEL_EV_CLOSED).source != server[1].id)
        ;
    IS(ginnel_peek(server[1], 0, &again), -EBADF);
    CHECK(again == NULL);
    IS(ginnel_consume(server[1], 1), -EBADF);
    IS(ginnel_peek(server[0], 0, NULL), -EFAULT);
    IS(ginnel_peek(server[0], 0, (const uint8_t **)(got + 1)), -EFAULT);
    IS(ginnel_peek((struct ginnel_conn){ 0 }, 0, &again), -EBADF);
    IS(ginnel_consume((struct ginnel_conn){ 0 }, 0), -EBADF);
    close_shard();
    IS(ginnel_peek(server[0], 0, &again), -EPERM);
    IS(ginnel_consume(server[0], 0), -EPERM);
}

static void lent_bytes_outlive_a_reset(void)
{
    struct ginnel_listener listener;
    struct ginnel_conn client, server;
    const uint8_t *bytes, *again;
    open_shard(NULL, NULL, NULL);
    IS(ginnel_listen(ADDRESS(PORT), NULL, &listener), 0);
    open_pair(listener, PORT, &client, &server);
    IS(ginnel_shutdown(client), 0);
    IS(expect(GINNEL_EV_PEER_CLOSED).source, server.id);
    IS(ginnel_send(server, "late bytes", 10), 10);
    IS(ginnel_conn_abort(server), 0);
    IS(expect(GINNEL_EV_READABLE).source, client.id);
    IS(ginnel_peek(client, 0, &bytes), 10);
    CHECK(memcmp(bytes, "late bytes", 10) == 0);
    IS(ginnel_peek(client, 4, &again), 6);
    CHECK(again == bytes + 4);
    IS(ginnel_peek(client, 10, &again), -EAGAIN);
    IS(ginnel_peek(client, SIZE_MAX, &again), -EAGAIN);
    IS(ginnel_consume(client, 11), -EINVAL);
    IS(ginnel_consume(client, 4), 0);
    IS(ginnel_unread(client), 6);
    IS(ginnel_peek(client, 0, &again), 6);
    CHECK(again == bytes + 4);
    IS(ginnel_consume(client, 6), 0);
    IS(ginnel_peek(client, 0, &again), -ECONNRESET);
    CHECK(again == NULL);
    while (expect(GINNEL_EV_CLOSED).source != client.id)
        ;
    IS(ginnel_peek(client, 0, &again), -EBADF);
    IS(ginnel_consume(client, 1), -EBADF);
    close_shard();
}

/* The window opens as bytes are consumed. */
static void large_transfer_is_read_in_place(void)
{
    enum { BYTES = 5 << 20 };
    struct ginnel_socket_options options = { .recv_buffer_bytes = 30000 };
    struct ginnel_listener listener;
    struct ginnel_conn client, server;
    static uint8_t sent[BYTES];
    for (size_t i = 0; i < BYTES; i++)
        sent[i] = (uint8_t)(i * 31 >> 5);
    open_shard(NULL, NULL, NULL);
    IS(ginnel_listen(ADDRESS(PORT), &options, &listener), 0);
    open_pair(listener, PORT, &client, &server);
    size_t queued = 0, received = 0, round = 0;
    while (received < BYTES) {
        ssize_t now = ginnel_send(client, sent + queued, BYTES - queued);
        CHECK(now >= 0);
        queued += (size_t)now;
        CHECK(ginnel_wait(NULL, &low, 5000) > 0);
        const uint8_t *bytes;
        while ((now = ginnel_peek(server, 0, &bytes)) > 0) {
            CHECK(memcmp(bytes, sent + received, (size_t)now) == 0);
            /* Sometimes a part of the piece. */
            size_t part = round++ % 3 == 0 && now > 1 ? (size_t)now / 2 : (size_t)now;
            IS(ginnel_consume(server, part), 0);
            received += part;
        }
        IS(now, -EAGAIN);
    }
    CHECK(round > 100);
    close_shard();
}

/* ---- Unordered receive ---- */

enum { STREAM = 300000 };

/* What was received of a stream: each byte once, in order or early. */
static struct {
    uint8_t seen[STREAM];
    size_t next, early, total;
} taken;
static uint8_t stream[STREAM];
static int data_frames;

static void take(size_t at, const uint8_t *bytes, size_t len)
{
    CHECK(at + len <= STREAM);
    CHECK(memcmp(bytes, stream + at, len) == 0);
    for (size_t i = at; i < at + len; i++) {
        CHECK(!taken.seen[i]);
        taken.seen[i] = 1;
    }
    taken.total += len;
}

static void take_in_order(const uint8_t *bytes, size_t len)
{
    take(taken.next, bytes, len);
    while (taken.next < STREAM && taken.seen[taken.next])
        taken.next++;
}

static void take_early(size_t ahead, const uint8_t *bytes, size_t len)
{
    CHECK(ahead > 0);
    take(taken.next + ahead, bytes, len);
    taken.early += len;
}

/* Makes every second long segment urgent, so that it overtakes the one before it if both arrive together. */
static uint8_t every_second(void *arg, const struct ginnel_packet *packet, uint8_t usual)
{
    if (packet->transmits || packet->payload_len < 1000)
        return usual;
    return ++*(int *)arg % 2 == 0 ? 6 : usual;
}

/* The two ends of a memif, which carries each segment in a frame of its own. On the loopback and on devices
 * with offloads, all that is sent at once is a single frame. */
static struct ginnel_config *memif_config(const char *role, int host)
{
    struct ginnel_config *made;
    char text[400];
    snprintf(text, sizeof(text),
             "run.directory = false\nshard.spin_us = 0\n"
             "[[device]]\nname = \"cable\"\nkind = \"memif\"\nmemif = \"socket=@ginnel-capi-%d,role=%s\"\n"
             "offload = false\n"
             "[[link]]\nname = \"cable\"\ndevice = \"cable\"\naddresses = [\"10.9.0.%d/24\"]\n",
             (int)getpid(), role, host);
    IS(ginnel_config_text(text, &made), 0);
    return made;
}

static struct sockaddr_in receiver_address(void)
{
    struct sockaddr_in receiver = address(PORT);
    receiver.sin_addr.s_addr = htonl(0x0a090001);
    return receiver;
}

static struct ginnel_stop *receiver_stop;

/* Connects to the receiver, sends the stream when the first byte of the receiver arrives, and stops the
 * receiver when the second one does. */
static void *send_stream(void *unused)
{
    static struct ginnel_event room[ROOM];
    struct ginnel_events events = { room, ROOM, 0 };
    struct ginnel_socket_options options = { .send_buffer_bytes = 1 << 20 };
    struct sockaddr_in receiver = receiver_address();
    struct ginnel_config *own = memif_config("client", 2);
    struct ginnel_stack *sender;
    struct ginnel_conn conn;
    size_t sent = 0;
    char signals[2];
    int got = 0;
    (void)unused;
    IS(ginnel_open(own, &sender), 0);
    IS(ginnel_enter(sender, 0, NULL), 0);
    IS(ginnel_connect((struct sockaddr *)&receiver, sizeof(receiver), NULL, 0, &options, &conn), 0);
    while (got < 2) {
        CHECK(ginnel_wait(NULL, &events, 5000) > 0);
        ssize_t len = ginnel_recv(conn, signals, (size_t)(2 - got));
        CHECK(len > 0 || len == -EAGAIN);
        got += len > 0 ? (int)len : 0;
        if (got == 0 || sent == STREAM)
            continue;
        len = ginnel_send(conn, stream + sent, STREAM - sent);
        CHECK(len >= 0);
        sent += (size_t)len;
    }
    IS(sent, STREAM);
    ginnel_stop_set(receiver_stop);
    IS(ginnel_leave(), 0);
    ginnel_close(sender);
    ginnel_config_free(own);
    return NULL;
}

static void configure_receiver(void)
{
    data_frames = 0;
    config = memif_config("server", 1);
    IS(ginnel_config_classifier(config, every_second, &data_frames), 0);
    IS(ginnel_stop_new(&receiver_stop), 0);
}

static pthread_t begin_stream(void)
{
    pthread_t thread;
    memset(&taken, 0, sizeof(taken));
    for (size_t i = 0; i < STREAM; i++)
        stream[i] = (uint8_t)(i % 251);
    IS(pthread_create(&thread, NULL, send_stream, NULL), 0);
    return thread;
}

static void end_stream(pthread_t thread, int is_unordered)
{
    IS(pthread_join(thread, NULL), 0);
    IS(taken.total, STREAM);
    CHECK(data_frames > 100);
    IS(taken.early > 0, is_unordered);
    ginnel_config_free(config);
    ginnel_stop_free(receiver_stop);
}

static const struct ginnel_socket_options LARGE_WINDOW = { .recv_buffer_bytes = 1 << 20 };

/* Receives a stream, all of which is in order unless the option is on. */
static void early_bytes_are_received_unordered(void)
{
    for (int on = 1; on >= 0; on--) {
        struct sockaddr_in receiver = receiver_address();
        struct ginnel_listener listener;
        struct ginnel_conn conn;
        static uint8_t buffer[100000];
        size_t ahead = 0;
        int reported = 0;
        ssize_t len;
        configure_receiver();
        IS(ginnel_open(config, &stack), 0);
        IS(ginnel_enter(stack, 0, receiver_stop), 0);
        IS(ginnel_listen((struct sockaddr *)&receiver, sizeof(receiver), &LARGE_WINDOW, &listener), 0);
        pthread_t thread = begin_stream();
        expect(GINNEL_EV_INCOMING);
        IS(ginnel_accept(listener, &conn), 0);
        IS(ginnel_conn_set_option(conn, GINNEL_OPT_UNORDERED, on), 0);
        IS(ginnel_recv_unordered(conn, buffer, sizeof(buffer), &ahead), -EAGAIN);
        IS(ginnel_send(conn, "1", 1), 1);
        while (taken.total < STREAM) {
            CHECK(ginnel_wait(&high, &low, 5000) > 0);
            struct ginnel_event *event = find(&high, GINNEL_EV_UNORDERED);
            if (!event)
                event = find(&low, GINNEL_EV_UNORDERED);
            if (event) {
                IS(event->source, conn.id);
                reported = 1;
            }
            while ((len = ginnel_recv_unordered(conn, buffer, sizeof(buffer), &ahead)) != -EAGAIN) {
                CHECK(len > 0 && reported);
                take_early(ahead, buffer, (size_t)len);
            }
            while ((len = ginnel_recv(conn, buffer, sizeof(buffer))) != -EAGAIN) {
                CHECK(len > 0);
                take_in_order(buffer, (size_t)len);
            }
        }
        IS(reported, on);
        IS(ginnel_send(conn, "2", 1), 1);
        while ((len = ginnel_wait(NULL, &low, 5000)) != -ECANCELED)
            CHECK(len > 0);
        close_shard();
        end_stream(thread, on);
    }
}

static void messages_overtake_each_other(void)
{
    enum { FILL = 200000 };
    struct ginnel_listener listener;
    struct ginnel_conn client, server;
    static char many[FILL], got[FILL + 8];
    open_shard(NULL, NULL, NULL);
    IS(ginnel_listen(ADDRESS(PORT), NULL, &listener), 0);
    open_pair(listener, PORT, &client, &server);
    memset(many, '.', FILL);
    IS(ginnel_send_message(client, many, FILL, 0), 0);
    IS(ginnel_send_message(client, "low", 3, 1), 0);
    IS(ginnel_send_message(client, "high", 4, 7), 0);
    IS(ginnel_send_message(client, many, 1 << 30, 7), -EMSGSIZE);
    receive(server, got, FILL + 7);
    /* No byte of the first was sent when the last was queued. */
    CHECK(memcmp(got, "high", 4) == 0);
    CHECK(memcmp(got + 4, many, FILL) == 0);
    CHECK(memcmp(got + 4 + FILL, "low", 3) == 0);
    close_shard();
}

static void urgent_bytes_are_received_out_of_band(void)
{
    struct ginnel_listener listener;
    struct ginnel_conn client, server;
    const uint8_t *bytes;
    char buffer[10];
    open_shard(NULL, NULL, NULL);
    IS(ginnel_listen(ADDRESS(PORT), NULL, &listener), 0);
    open_pair(listener, PORT, &client, &server);
    IS(ginnel_recv_urgent(server), -EAGAIN);
    for (int in_place = 0; in_place < 2; in_place++) {
        IS(ginnel_send_urgent(client, "abc", 3), 3);
        IS(ginnel_send(client, "def", 3), 3);
        IS(expect(GINNEL_EV_URGENT).source, server.id);
        while (ginnel_unread(server) < 6)
            CHECK(ginnel_wait(NULL, &low, 5000) >= 0);
        if (in_place) {
            IS(ginnel_peek(server, 0, &bytes), 2);
            CHECK(memcmp(bytes, "ab", 2) == 0);
            IS(ginnel_peek(server, 2, &bytes), -EAGAIN);
            IS(ginnel_consume(server, 3), -EINVAL);
            IS(ginnel_consume(server, 2), 0);
            IS(ginnel_peek(server, 0, &bytes), 3);
            CHECK(memcmp(bytes, "def", 3) == 0);
            IS(ginnel_recv_urgent(server), 'c');
            IS(ginnel_consume(server, 4), -EINVAL);
            IS(ginnel_consume(server, 3), 0);
        } else {
            IS(ginnel_recv(server, buffer, sizeof(buffer)), 2);
            IS(ginnel_recv_urgent(server), 'c');
            IS(ginnel_recv(server, buffer, sizeof(buffer)), 3);
            CHECK(memcmp(buffer, "def", 3) == 0);
        }
        IS(ginnel_recv_urgent(server), -EAGAIN);
        IS(ginnel_unread(server), 0);
    }
    IS(ginnel_conn_set_option(server, GINNEL_OPT_OOBINLINE, 1), 0);
    IS(ginnel_send_urgent(client, "\xff", 1), 1);
    IS(expect(GINNEL_EV_URGENT).source, server.id);
    IS(ginnel_recv_urgent(server), -EAGAIN);
    receive(server, buffer, 1);
    IS((uint8_t)buffer[0], 0xff);
    IS(ginnel_send_urgent(client, NULL, 1), -EFAULT);
    IS(ginnel_send_urgent((struct ginnel_conn){ 0 }, "x", 1), -EBADF);
    IS(ginnel_recv_urgent((struct ginnel_conn){ 0 }), -EBADF);
    close_shard();
}

/* Whatever reads it, an urgent byte does not hide the end of the stream behind it. */
static void stream_ends_after_an_urgent_byte(void)
{
    struct ginnel_listener listener;
    struct ginnel_conn client, server;
    const uint8_t *bytes;
    char buffer[10];
    open_shard(NULL, NULL, NULL);
    IS(ginnel_listen(ADDRESS(PORT), NULL, &listener), 0);
    for (int variant = 0; variant < 4; variant++) {
        int in_place = variant & 1, takes_it = variant & 2;
        open_pair(listener, PORT, &client, &server);
        IS(ginnel_send_urgent(client, "x", 1), 1);
        IS(expect(GINNEL_EV_URGENT).source, server.id);
        while (ginnel_unread(server) < 1)
            CHECK(ginnel_wait(NULL, &low, 5000) >= 0);
        IS(ginnel_peek(server, 0, &bytes), -EAGAIN);
        IS(ginnel_consume(server, 0), 0);
        if (takes_it)
            IS(ginnel_recv_urgent(server), 'x');
        IS(ginnel_shutdown(client), 0);
        IS(expect(GINNEL_EV_PEER_CLOSED).source, server.id);
        if (in_place)
            IS(ginnel_peek(server, 0, &bytes), 0);
        else
            IS(ginnel_recv(server, buffer, sizeof(buffer)), 0);
        IS(ginnel_unread(server), 0);
        IS(ginnel_conn_close(server), 0);
        /* No byte was left, so the server ends by a FIN. */
        IS(expect(GINNEL_EV_CLOSED).error, 0);
    }
    close_shard();
}

/* Counts SYNs with data that are sent. */
static uint8_t count_syn_data(void *arg, const struct ginnel_packet *packet, uint8_t usual)
{
    const uint8_t *ip = packet->frame + 14, *tcp = ip + 20;
    CHECK(packet->frame_len >= 34);
    if (!packet->transmits && ip[0] == 0x45 && ip[9] == IPPROTO_TCP && tcp[13] & 2 && packet->payload_len > 0)
        ++*(int *)arg;
    return usual;
}

static void fast_open_carries_data_in_the_syn(void)
{
    struct ginnel_listen_options options = { .size = sizeof(options), .fastopen_queue = 10 };
    struct ginnel_socket_options no_cookie = { .flags = GINNEL_FASTOPEN_NO_COOKIE };
    struct ginnel_listener listener[4];
    struct ginnel_conn client, server;
    char buffer[10];
    int syns = 0;
    open_configured("tcp.fastopen = 3\n", count_syn_data, &syns, NULL);
    IS(ginnel_listen_with(ADDRESS(PORT), &options, &listener[0]), 0);
    options.fastopen_key[15] = 1;
    IS(ginnel_listen_with(ADDRESS(PORT + 1), &options, &listener[1]), 0);
    options.socket.flags = GINNEL_FASTOPEN_NO_COOKIE;
    IS(ginnel_listen_with(ADDRESS(PORT + 2), &options, &listener[2]), 0);
    /* A program that knows fewer options. */
    options = (struct ginnel_listen_options){ .fastopen_queue = 99 };
    options.size = offsetof(struct ginnel_listen_options, fastopen_queue);
    IS(ginnel_listen_with(ADDRESS(PORT + 3), &options, &listener[3]), 0);
    /* The port, whether the client wants a cookie, and whether the SYN carries data: the first one requests a
     * cookie, the second one has it. Another key makes it a wrong one, whose data the listener ignores. */
    static const struct { int port, without_cookie, has_data; } steps[] = {
        { 0, 0, 0 }, { 0, 0, 1 }, { 1, 0, 1 }, { 2, 1, 1 }, { 3, 0, 1 }, { 3, 1, 1 },
    };
    for (size_t i = 0; i < sizeof(steps) / sizeof(*steps); i++) {
        const struct ginnel_socket_options *wanted = steps[i].without_cookie ? &no_cookie : NULL;
        int port = steps[i].port, before = syns;
        IS(ginnel_connect_with_data(ADDRESS(PORT + port), NULL, 0, wanted, "early", 5, &client), 5);
        IS(expect(GINNEL_EV_INCOMING).source, listener[port].id);
        IS(ginnel_accept(listener[port], &server), 0);
        receive(server, buffer, 5);
        CHECK(memcmp(buffer, "early", 5) == 0);
        IS(syns - before, steps[i].has_data);
        IS(ginnel_send(server, "answer", 6), 6);
        receive(client, buffer, 6);
        IS(ginnel_conn_abort(client), 0);
    }
    IS(ginnel_connect_with_data(ADDRESS(PORT), NULL, 0, NULL, NULL, 1, &client), -EFAULT);
    IS(ginnel_connect_with_data(ADDRESS(PORT), NULL, 0, NULL, "x", 1, NULL), -EFAULT);
    IS(ginnel_connect_with_data(NULL, 0, NULL, 0, NULL, "x", 1, &client), -EINVAL);
    IS(ginnel_listen_with(ADDRESS(99), NULL, &listener[0]), -EFAULT);
    options.size = 8;
    IS(ginnel_listen_with(ADDRESS(99), &options, &listener[0]), -EINVAL);
    CHECK(strstr(ginnel_error(), "ginnel_listen_options"));
    options.size = sizeof(options) + 8;
    IS(ginnel_listen_with(ADDRESS(99), &options, &listener[0]), -EINVAL);
    options = (struct ginnel_listen_options){ .size = sizeof(options), .reserved = 1 };
    IS(ginnel_listen_with(ADDRESS(99), &options, &listener[0]), -EINVAL);
    options = (struct ginnel_listen_options){ .size = sizeof(options), .fastopen_backup_key = { 1 } };
    IS(ginnel_listen_with(ADDRESS(99), &options, &listener[0]), -EINVAL);
    options = (struct ginnel_listen_options){ .size = sizeof(options), .socket.flags = 1u << 31 };
    IS(ginnel_listen_with(ADDRESS(99), &options, &listener[0]), -EINVAL);
    close_shard();
}

/* Drives the shard for some milliseconds. Returns whether an event with one of these bits happened. */
static int happens(uint32_t events)
{
    int found = 0;
    for (int i = 0; i < 10; i++) {
        CHECK(ginnel_wait(NULL, &low, 3) >= 0);
        found |= find(&low, events) != NULL;
    }
    return found;
}

static void listener_options_are_applied(void)
{
    struct ginnel_listen_options options = { .size = sizeof(options), .min_ttl = 65 };
    struct ginnel_socket_options far = { .hop_limit = 64 }, near = { .hop_limit = 65 };
    struct ginnel_listener listener;
    struct ginnel_conn client, server;
    uint8_t headers[200];
    open_shard(NULL, NULL, NULL);
    IS(ginnel_listen_with(ADDRESS(1), &options, &listener), 0);
    IS(ginnel_connect(ADDRESS(1), NULL, 0, &far, &client), 0);
    IS(happens(GINNEL_EV_INCOMING | GINNEL_EV_CONNECTED | GINNEL_EV_CLOSED), 0);
    IS(ginnel_conn_abort(client), 0);
    IS(ginnel_connect(ADDRESS(1), NULL, 0, &near, &client), 0);
    IS(expect(GINNEL_EV_INCOMING).source, listener.id);
    IS(ginnel_accept(listener, &server), 0);
    IS(ginnel_conn_saved_syn(server, headers, sizeof(headers)), 0);
    /* A connection without data is not accepted. */
    options = (struct ginnel_listen_options){ .size = sizeof(options), .defer_accept_s = 10 };
    options.save_syn = GINNEL_SAVE_SYN_PACKET;
    IS(ginnel_listen_with(ADDRESS(2), &options, &listener), 0);
    IS(ginnel_connect(ADDRESS(2), NULL, 0, &near, &client), 0);
    IS(happens(GINNEL_EV_INCOMING), 0);
    IS(ginnel_send(client, "x", 1), 1);
    IS(expect(GINNEL_EV_INCOMING).source, listener.id);
    IS(ginnel_accept(listener, &server), 0);
    /* The headers of its SYN. */
    memset(headers, 0xee, sizeof(headers));
    ssize_t len = ginnel_conn_saved_syn(server, headers, 39);
    CHECK(len >= 40 && len <= 80);
    IS(headers[0], 0xee);
    IS(ginnel_conn_saved_syn(server, NULL, 0), len);
    IS(ginnel_conn_saved_syn(server, headers, (size_t)len), len);
    IS(headers[0], 0x45);
    IS(headers[8], 65);
    IS(headers[20 + 13] & 0x12, 2);
    IS(ginnel_conn_saved_syn(server, headers, sizeof(headers)), 0);
    IS(ginnel_conn_saved_syn(server, NULL, 1), -EFAULT);
    IS(ginnel_conn_saved_syn((struct ginnel_conn){ 0 }, headers, 1), -EBADF);
    IS(ginnel_conn_saved_syn((struct ginnel_conn){ 99 }, headers, 1), -EBADF);

    options = (struct ginnel_listen_options){ .size = sizeof(options), .save_syn = 3 };
    IS(ginnel_listen_with(ADDRESS(3), &options, &listener), -EINVAL);
    options = (struct ginnel_listen_options){ .size = sizeof(options), .rto_min_us = 200001 };
    IS(ginnel_listen_with(ADDRESS(3), &options, &listener), -EINVAL);
    options = (struct ginnel_listen_options){ .size = sizeof(options), .rto_max_ms = 999 };
    IS(ginnel_listen_with(ADDRESS(3), &options, &listener), -EINVAL);
    options = (struct ginnel_listen_options){ .size = sizeof(options), .delayed_ack_max_us = 999 };
    IS(ginnel_listen_with(ADDRESS(3), &options, &listener), -EINVAL);
    options = (struct ginnel_listen_options){
        .size = sizeof(options), .rto_min_us = 200000, .rto_max_ms = 1000, .delayed_ack_max_us = 1000
    };
    IS(ginnel_listen_with(ADDRESS(3), &options, &listener), 0);
    close_shard();
}

static void connection_options_are_applied(void)
{
    static const struct { int option; long long least, most; } ranges[] = {
        { GINNEL_OPT_MIN_HOP_LIMIT, 0, 255 },
        { GINNEL_OPT_RTO_MIN_US, 1000, 200000 },
        { GINNEL_OPT_RTO_MAX_MS, 1000, 120000 },
        { GINNEL_OPT_DELACK_MAX_US, 1000, 200000 },
        { GINNEL_OPT_SYNCNT, 1, 127 },
        { GINNEL_OPT_LINGER2_S, 1, 32767 },
        { GINNEL_OPT_MAX_PACING_RATE, 0, INT64_MAX },
        { GINNEL_OPT_CONGESTION, GINNEL_CONGESTION_CUBIC, GINNEL_CONGESTION_BBR },
    };
    struct ginnel_listener listener;
    struct ginnel_conn client, server;
    char buffer[10];
    open_shard(NULL, NULL, NULL);
    IS(ginnel_listen(ADDRESS(PORT), NULL, &listener), 0);
    open_pair(listener, PORT, &client, &server);
    for (size_t i = 0; i < sizeof(ranges) / sizeof(*ranges); i++) {
        IS(ginnel_conn_set_option(client, ranges[i].option, ranges[i].least - 1), -EINVAL);
        if (ranges[i].most < INT64_MAX)
            IS(ginnel_conn_set_option(client, ranges[i].option, ranges[i].most + 1), -EINVAL);
        IS(ginnel_conn_set_option(client, ranges[i].option, ranges[i].most), 0);
        IS(ginnel_conn_set_option(client, ranges[i].option, ranges[i].least), 0);
    }
    IS(ginnel_conn_set_option(client, GINNEL_OPT_MAY_FRAGMENT, 1), 0);
    IS(ginnel_conn_set_option(client, GINNEL_OPT_CONGESTION + 1, 1), -ENOPROTOOPT);
    /* Segments from afar are dropped. */
    IS(ginnel_conn_set_option(server, GINNEL_OPT_MIN_HOP_LIMIT, 255), 0);
    IS(ginnel_send(client, "x", 1), 1);
    IS(happens(GINNEL_EV_READABLE), 0);
    IS(ginnel_conn_set_option(client, GINNEL_OPT_HOP_LIMIT, 255), 0);
    IS(expect(GINNEL_EV_READABLE).source, server.id);
    IS(ginnel_recv(server, buffer, sizeof(buffer)), 1);
    close_shard();
}

static int released;

static void count_release(void *arg, const void *data, size_t len)
{
    CHECK(arg == &released);
    CHECK(data != NULL && len == 100000);
    released++;
}

static void fill_with_offsets(void *arg, size_t offset, uint8_t *out, size_t len)
{
    ++*(int *)arg;
    for (size_t i = 0; i < len; i++)
        out[i] = (uint8_t)((offset + i) % 251);
    IS(ginnel_unread((struct ginnel_conn){ 1 }), -EPERM);
}

static void memory_is_sent_without_a_copy(void)
{
    struct ginnel_listener listener;
    struct ginnel_conn client, server;
    struct ginnel_source source;
    static char data[100000], got[300000];
    int fills = 0;
    for (size_t i = 0; i < sizeof(data); i++)
        data[i] = (char)(i % 253);
    open_shard(NULL, NULL, NULL);
    IS(ginnel_listen(ADDRESS(PORT), NULL, &listener), 0);
    open_pair(listener, PORT, &client, &server);
    IS(ginnel_source_add(data, 0, NULL, NULL, &source), -EINVAL);
    IS(ginnel_source_add(data, sizeof(data), count_release, &released, &source), 0);
    IS(ginnel_send_source(client, source, 1, sizeof(data)), -EINVAL);
    IS(ginnel_send_source(client, source, UINT64_MAX, 2), -EINVAL);
    IS(ginnel_send_source(client, (struct ginnel_source){ 0 }, 0, 1), -EINVAL);
    IS(ginnel_send_source(client, source, 0, sizeof(data)), 0);
    IS(ginnel_send_source(client, source, 99000, 1000), 0);
    IS(ginnel_source_release(source), 0);
    IS(ginnel_send_source(client, source, 0, 1), -EINVAL);
    IS(released, 0);
    /* The memory is read when segments are built. */
    data[0] = 'X';
    receive(server, got, 101000);
    CHECK(got[0] == 'X' && memcmp(got, data, 100000) == 0 && memcmp(got + 100000, data + 99000, 1000) == 0);
    for (int i = 0; i < 1000 && !released; i++)
        CHECK(ginnel_wait(NULL, &low, 10) >= 0);
    IS(released, 1);
    IS(ginnel_send_fill(client, 30000, fill_with_offsets, &fills), 30000);
    CHECK(fills > 0);
    IS(ginnel_send_fill(client, 1, NULL, NULL), -EFAULT);
    receive(server, got, 30000);
    for (size_t i = 0; i < 30000; i++)
        IS((uint8_t)got[i], i % 251);
    close_shard();
    IS(released, 1);
}

static void source_outlives_its_connection(void)
{
    struct ginnel_listener listener;
    struct ginnel_conn client, server;
    struct ginnel_source source;
    static char data[100000];
    open_shard(NULL, NULL, NULL);
    IS(ginnel_listen(ADDRESS(PORT), NULL, &listener), 0);
    open_pair(listener, PORT, &client, &server);
    IS(ginnel_source_add(data, sizeof(data), count_release, &released, &source), 0);
    IS(ginnel_send_source(client, source, 0, sizeof(data)), 0);
    IS(ginnel_conn_abort(client), 0);
    CHECK(expect(GINNEL_EV_CLOSED).error != 0);
    IS(released, 0);
    /* The end of the shard releases it. */
    close_shard();
    IS(released, 1);
}

static void *command_from_thread(void *commander)
{
    usleep(20000);
    IS(ginnel_command(commander, 4711), 0);
    /* A thread without a shard. */
    IS(ginnel_shard(), -EPERM);
    return NULL;
}

static void timers_descriptors_and_commands_wake_the_shard(void)
{
    struct ginnel_timer timer, other;
    struct ginnel_fd watched;
    struct ginnel_commander *commander;
    uint64_t before, after;
    int pipes[2];
    char byte;
    pthread_t thread;
    open_shard(NULL, NULL, NULL);
    IS(ginnel_now(&before), 0);
    IS(ginnel_timer_set(30000000, 11, &timer), 0);
    IS(ginnel_timer_set(20000000, 12, &other), 0);
    IS(ginnel_timer_cancel(other), 0);
    IS(ginnel_timer_cancel(other), -EBADF);
    IS(expect(GINNEL_EV_TIMER).token, 11);
    IS(ginnel_now(&after), 0);
    CHECK(after - before >= 30000000);
    IS(ginnel_timer_cancel(timer), -EBADF);
    IS(ginnel_timer_cancel((struct ginnel_timer){ ~0ull }), -EBADF);
    /* Numbers that were never handles, of entries that are in use and of entries that are free. */
    for (uint64_t generation = 0; generation < 8; generation += 2)
        for (uint64_t index = 0; index < 4; index++)
            IS(ginnel_timer_cancel((struct ginnel_timer){ generation << 32 | index }), -EBADF);
    IS(ginnel_wait(&low, &low, 0), -EINVAL);
    struct ginnel_events same_room = low;
    IS(ginnel_wait(&same_room, &low, 0), -EINVAL);
    IS(ginnel_timer_set(10000000, 13, NULL), 0);
    IS(expect(GINNEL_EV_TIMER).token, 13);
    /* A call that fails sets no timer. */
    IS(ginnel_timer_set(0, 14, (struct ginnel_timer *)((char *)&timer + 1)), -EFAULT);
    IS(ginnel_wait(NULL, &low, 10), 0);

    IS(pipe(pipes), 0);
    IS(ginnel_fd_add(pipes[0], GINNEL_FD_READ, 5, &watched), 0);
    IS(ginnel_fd_add(pipes[0], GINNEL_FD_READ, 5, &watched), -EEXIST);
    IS(ginnel_fd_add(-1, GINNEL_FD_READ, 5, &watched), -EBADF);
    IS(ginnel_fd_add(9999, GINNEL_FD_READ, 5, &watched), -EBADF);
    IS(ginnel_fd_add(pipes[0], 8, 5, &watched), -EINVAL);
    IS(ginnel_wait(NULL, &low, 10), 0);
    IS(write(pipes[1], "x", 1), 1);
    struct ginnel_event event = expect(GINNEL_EV_FD_READABLE);
    IS(event.token, 5);
    IS(event.events, GINNEL_EV_FD_READABLE);
    IS(read(pipes[0], &byte, 1), 1);
    IS(ginnel_fd_modify(watched, 0), 0);
    IS(write(pipes[1], "x", 1), 1);
    while (ginnel_wait(NULL, &low, 10) > 0)
        ;
    IS(ginnel_fd_remove(watched), 0);
    IS(ginnel_fd_remove(watched), -EBADF);
    IS(ginnel_fd_modify(watched, 0), -EBADF);

    IS(ginnel_commander_new(&commander), 0);
    IS(pthread_create(&thread, NULL, command_from_thread, commander), 0);
    IS(expect(GINNEL_EV_COMMAND).token, 4711);
    pthread_join(thread, NULL);
    close_shard();
    IS(ginnel_command(commander, 1), -ESRCH);
    ginnel_commander_free(commander);
}

static void exact_timers_expire_in_order(void)
{
    struct ginnel_timer timer;
    uint64_t start, now;
    open_shard(NULL, NULL, NULL);
    IS(ginnel_now(&start), 0);
    IS(ginnel_timer_set_exact(start + 10000001, 2, NULL), 0);
    IS(ginnel_timer_set_exact(start + 10000000, 1, &timer), 0);
    IS(ginnel_timer_set_exact(UINT64_MAX, 3, NULL), 0);
    IS(ginnel_timer_set_exact(start + 5000000, 4, (struct ginnel_timer *)((char *)&timer + 1)), -EFAULT);
    for (uint64_t token = 1; token <= 2; token++) {
        struct ginnel_events one = { low_room, 1, 0 };
        IS(ginnel_wait(NULL, &one, 5000), 1);
        IS(one.events[0].token, token);
        IS(ginnel_now(&now), 0);
        CHECK(now >= start + 9999999 + token);
    }
    IS(ginnel_timer_cancel(timer), -EBADF);
    /* A time that has passed. */
    IS(ginnel_timer_set_exact(0, 5, &timer), 0);
    IS(expect(GINNEL_EV_TIMER).token, 5);
    IS(ginnel_timer_set_exact(start + 1000000000000, 6, &timer), 0);
    IS(ginnel_timer_cancel(timer), 0);
    IS(ginnel_wait(NULL, &low, 10), 0);
    close_shard();
    IS(ginnel_timer_set_exact(0, 5, &timer), -EPERM);
}

/* Opens a socket that is connected to a port of this shard. */
static struct ginnel_udp connected_socket(uint16_t port)
{
    struct ginnel_udp socket;
    IS(ginnel_udp_bind(ADDRESS(0), 0, &socket), 0);
    IS(ginnel_udp_connect(socket, ADDRESS(port)), 0);
    return socket;
}

static void shard_answers_questions(void)
{
    static const struct { const char *name; uint64_t least, most; } counters[] = {
        { "shard.timers", 1, 1 }, { "tcp.active_opens", 1, 1 }, { "ip.rx_udp", 1, 1 },
        { "drop.bad_ip_checksum", 0, 0 },
    };
    enum { COUNTERS = sizeof(counters) / sizeof(*counters) };
    struct ginnel_listener listener;
    struct ginnel_conn client, server;
    uint64_t before[COUNTERS], after, random[2];
    struct ginnel_udp socket;
    open_shard(NULL, NULL, NULL);
    IS(ginnel_shard(), 0);
    IS(ginnel_worker(), 0);
    IS(ginnel_serves(ADDRESS(0)), 1);
    IS(ginnel_serves(NULL, 16), -EFAULT);
    IS(ginnel_random(&random[0]), 0);
    IS(ginnel_random(&random[1]), 0);
    CHECK(random[0] != random[1]);
    IS(ginnel_random(NULL), -EFAULT);
    for (int i = 0; i < COUNTERS; i++)
        IS(ginnel_counter(counters[i].name, &before[i]), 0);
    IS(ginnel_listen(ADDRESS(PORT), NULL, &listener), 0);
    open_pair(listener, PORT, &client, &server);
    IS(ginnel_udp_bind(ADDRESS(53), 0, &socket), 0);
    IS(ginnel_udp_send(connected_socket(53), "x", 1, NULL, 0, NULL, 0), 0);
    IS(expect(GINNEL_EV_DATAGRAMS).source, socket.id);
    IS(ginnel_timer_set(0, 1, NULL), 0);
    IS(expect(GINNEL_EV_TIMER).token, 1);
    for (int i = 0; i < COUNTERS; i++) {
        IS(ginnel_counter(counters[i].name, &after), 0);
        CHECK(after - before[i] >= counters[i].least && after - before[i] <= counters[i].most);
    }
    IS(ginnel_counter("tcp", &after), -ENOENT);
    IS(ginnel_counter("tcp.nothing", &after), -ENOENT);
    CHECK(strstr(ginnel_error(), "tcp.nothing"));
    IS(ginnel_counter("pool.turns", &after), -ENOENT);
    IS(ginnel_counter(NULL, &after), -EFAULT);
    IS(ginnel_counter("\xff", &after), -EILSEQ);
    IS(ginnel_counter("shard.turns", NULL), -EFAULT);
    close_shard();
    IS(ginnel_worker(), -EPERM);
    IS(ginnel_serves(ADDRESS(0)), -EPERM);
    IS(ginnel_random(&random[0]), -EPERM);
    IS(ginnel_counter("shard.turns", &after), -EPERM);
}

static void datagrams_are_carried(void)
{
    struct ginnel_udp server, client;
    struct ginnel_datagram datagram;
    struct sockaddr_storage local;
    char buffer[100];
    open_shard(NULL, NULL, NULL);
    IS(ginnel_udp_bind(ADDRESS(53), 0, &server), 0);
    IS(ginnel_udp_bind(ADDRESS(53), 0, &client), -EADDRINUSE);
    IS(ginnel_udp_bind(ADDRESS(0), 0, &client), 0);
    IS(ginnel_udp_send(client, "q", 1, NULL, 0, NULL, 0), -EDESTADDRREQ);
    IS(ginnel_udp_connect(client, ADDRESS(53)), 0);
    IS(ginnel_udp_send(client, "question", 8, NULL, 0, NULL, 0), 0);
    IS(expect(GINNEL_EV_DATAGRAMS).source, server.id);
    /* A call that fails takes no datagram. */
    IS(ginnel_udp_recv(server, buffer, 3, (struct ginnel_datagram *)((char *)&datagram + 1)), -EFAULT);
    IS(ginnel_udp_recv(server, buffer, 3, &datagram), 3);
    IS(datagram.len, 8);
    IS(ginnel_udp_local(client, &local), 0);
    IS(((struct sockaddr_in *)&datagram.from)->sin_port, ((struct sockaddr_in *)&local)->sin_port);
    IS(ginnel_udp_recv(server, buffer, 3, NULL), -EAGAIN);
    IS(ginnel_udp_send(server, "answer", 6, (struct sockaddr *)&datagram.from, sizeof(datagram.from),
                       (struct sockaddr *)&datagram.to, sizeof(datagram.to)), 0);
    IS(expect(GINNEL_EV_DATAGRAMS).source, client.id);
    IS(ginnel_udp_recv(client, buffer, sizeof(buffer), NULL), 6);
    /* An error comes from the peer whose socket is closed. */
    IS(ginnel_udp_close(server), 0);
    IS(ginnel_udp_close(server), -EBADF);
    IS(ginnel_udp_send(client, "question", 8, NULL, 0, NULL, 0), 0);
    IS(expect(GINNEL_EV_DATAGRAMS).source, client.id);
    IS(ginnel_udp_recv(client, buffer, sizeof(buffer), NULL), -ECONNREFUSED);
    close_shard();
}

static uint8_t keep_priority(void *arg, const struct ginnel_packet *packet, uint8_t usual)
{
    (void)arg;
    (void)packet;
    return usual;
}

static void udp_options_are_applied(void)
{
    struct ginnel_udp servers[2], usual, urgent;
    struct ginnel_udp_options options = { .priority = 6, .tos = 0xb8, .hop_limit = 9 };
    struct ginnel_datagram datagram;
    struct sockaddr_in6 any = { .sin6_family = AF_INET6, .sin6_port = htons(55) };
    char buffer[300];
    open_shard(keep_priority, NULL, NULL);
    IS(ginnel_udp_bind(ADDRESS(53), 0, &servers[0]), 0);
    IS(ginnel_udp_bind(ADDRESS(54), 0, &servers[1]), 0);
    usual = connected_socket(53);
    urgent = connected_socket(54);
    IS(ginnel_udp_set_options(urgent, &options), 0);
    IS(ginnel_udp_send(usual, "usual", 5, NULL, 0, NULL, 0), 0);
    IS(ginnel_udp_send(urgent, "urgent", 6, NULL, 0, NULL, 0), 0);
    uint64_t in_high = 0, in_low = 0;
    while (!in_high || !in_low) {
        CHECK(ginnel_wait(&high, &low, 5000) > 0);
        struct ginnel_event *event = find(&high, GINNEL_EV_DATAGRAMS);
        if (event) {
            in_high = event->source;
            IS(event->class_, 6);
        }
        event = find(&low, GINNEL_EV_DATAGRAMS);
        if (event) {
            CHECK(in_high);
            in_low = event->source;
        }
    }
    IS(in_low, servers[0].id);
    IS(in_high, servers[1].id);
    IS(ginnel_udp_recv(servers[1], buffer, sizeof(buffer), &datagram), 6);
    IS(datagram.tos, 0xb8);
    IS(datagram.hop_limit, 9);
    IS(datagram.gso_size, 0);
    IS(ginnel_udp_recv(servers[0], buffer, sizeof(buffer), &datagram), 5);
    IS(datagram.tos, 0);
    CHECK(datagram.hop_limit > 9);
    /* A small receive buffer drops what does not fit. */
    options = (struct ginnel_udp_options){ .recv_buffer_bytes = 2000 };
    IS(ginnel_udp_set_options(servers[0], &options), 0);
    for (int i = 0; i < 20; i++)
        IS(ginnel_udp_send(usual, buffer, 200, NULL, 0, NULL, 0), 0);
    IS(expect(GINNEL_EV_DATAGRAMS).source, servers[0].id);
    int received = 0;
    while (ginnel_udp_recv(servers[0], buffer, sizeof(buffer), NULL) == 200)
        received++;
    CHECK(received > 1 && received < 15);
    /* A socket that was bound to IPv6 alone stays so. */
    IS(ginnel_udp_bind((struct sockaddr *)&any, sizeof(any), GINNEL_UDP_V6_ONLY, &urgent), 0);
    IS(ginnel_udp_set_options(urgent, &options), 0);
    IS(ginnel_udp_bind(ADDRESS(55), 0, &servers[1]), 0);

    IS(ginnel_udp_set_options(usual, NULL), -EFAULT);
    IS(ginnel_udp_set_options((struct ginnel_udp){ 0 }, &options), -EBADF);
    options = (struct ginnel_udp_options){ .priority = 8 };
    IS(ginnel_udp_set_options(usual, &options), -EINVAL);
    options = (struct ginnel_udp_options){ .pmtu_discovery = 6 };
    IS(ginnel_udp_set_options(usual, &options), -EINVAL);
    options = (struct ginnel_udp_options){ .flags = 1u << 31 };
    IS(ginnel_udp_set_options(usual, &options), -EINVAL);
    IS(ginnel_udp_bind(ADDRESS(0), 1u << 31, &urgent), -EINVAL);
    options = (struct ginnel_udp_options){ .reserved = { 0, 0, 0, 1 } };
    IS(ginnel_udp_set_options(usual, &options), -EINVAL);
    IS(ginnel_udp_close(usual), 0);
    options = (struct ginnel_udp_options){ 0 };
    IS(ginnel_udp_set_options(usual, &options), -EBADF);
    close_shard();
}

static void udp_segments_are_sent_and_joined(void)
{
    struct ginnel_udp server, client, other;
    struct ginnel_udp_options options = { .flags = GINNEL_UDP_GRO };
    struct ginnel_datagram datagram;
    static char sent[70000], got[70000];
    for (size_t i = 0; i < sizeof(sent); i++)
        sent[i] = (char)(i % 251);
    open_shard(NULL, NULL, NULL);
    IS(ginnel_udp_bind(ADDRESS(53), 0, &server), 0);
    client = connected_socket(53);
    IS(ginnel_udp_send_segments(client, sent, 250, 100, NULL, 0, NULL, 0), 0);
    IS(expect(GINNEL_EV_DATAGRAMS).source, server.id);
    for (size_t at = 0; at < 250; at += 100) {
        IS(ginnel_udp_recv(server, got, sizeof(got), &datagram), at < 200 ? 100 : 50);
        IS(datagram.gso_size, 0);
        CHECK(memcmp(got, sent + at, datagram.len) == 0);
    }
    IS(ginnel_udp_recv(server, got, sizeof(got), &datagram), -EAGAIN);
    IS(ginnel_udp_set_options(server, &options), 0);
    IS(ginnel_udp_send_segments(client, sent, 250, 100, NULL, 0, NULL, 0), 0);
    IS(expect(GINNEL_EV_DATAGRAMS).source, server.id);
    IS(ginnel_udp_recv(server, got, sizeof(got), &datagram), 250);
    IS(datagram.len, 250);
    IS(datagram.gso_size, 100);
    CHECK(memcmp(got, sent, 250) == 0);
    IS(ginnel_udp_send_segments(client, sent, 129, 1, NULL, 0, NULL, 0), -EMSGSIZE);
    IS(ginnel_udp_send_segments(client, sent, sizeof(sent), 1000, NULL, 0, NULL, 0), -EMSGSIZE);
    IS(ginnel_udp_send_segments(client, sent, 250, 0, NULL, 0, NULL, 0), -EINVAL);
    IS(ginnel_udp_send_segments(client, sent, 250, 65536, NULL, 0, NULL, 0), -EINVAL);
    IS(ginnel_udp_send_segments(client, NULL, 250, 100, NULL, 0, NULL, 0), -EFAULT);
    IS(ginnel_udp_bind(ADDRESS(0), 0, &other), 0);
    IS(ginnel_udp_send_segments(other, sent, 250, 100, NULL, 0, NULL, 0), -EDESTADDRREQ);
    IS(ginnel_udp_send_segments(other, sent, 200, 100, ADDRESS(53), NULL, 0), 0);
    IS(expect(GINNEL_EV_DATAGRAMS).source, server.id);
    IS(ginnel_udp_recv(server, got, sizeof(got), &datagram), 200);
    close_shard();
}

static void errors_about_datagrams_are_queued(void)
{
    struct ginnel_udp_options options = { .flags = GINNEL_UDP_RECVERR_V4, .pmtu_discovery = GINNEL_PMTU_DO };
    struct sockaddr_in peer = address(53);
    struct ginnel_udp_error error;
    struct ginnel_udp socket;
    static char buffer[2000];
    open_shard(NULL, NULL, NULL);
    /* No socket has the port. */
    IS(ginnel_udp_bind(ADDRESS(0), GINNEL_UDP_RECVERR_V4, &socket), 0);
    IS(ginnel_udp_recv_error(socket, buffer, sizeof(buffer), &error), -EAGAIN);
    IS(ginnel_udp_send(socket, "question", 8, ADDRESS(53), NULL, 0), 0);
    IS(expect(GINNEL_EV_DATAGRAMS).source, socket.id);
    IS(ginnel_udp_recv_error(socket, buffer, 5, &error), 5);
    CHECK(memcmp(buffer, "quest", 5) == 0);
    IS(error.len, 8);
    IS(error.error, ECONNREFUSED);
    IS(error.icmp_type, 3);
    IS(error.icmp_code, 3);
    IS(error.extensions, -1);
    IS(error.has_more, 0);
    IS(((struct sockaddr_in *)&error.destination)->sin_port, htons(53));
    IS(((struct sockaddr_in *)&error.offender)->sin_addr.s_addr, htonl(INADDR_LOOPBACK));
    IS(ginnel_udp_recv_error(socket, buffer, sizeof(buffer), &error), -EAGAIN);
    IS(ginnel_udp_recv_error(socket, buffer, sizeof(buffer), NULL), -EFAULT);
    IS(ginnel_udp_recv_error(socket, NULL, 1, &error), -EFAULT);
    IS(ginnel_udp_path_mtu(socket), -EDESTADDRREQ);
    IS(ginnel_udp_close(socket), 0);
    IS(ginnel_udp_recv_error(socket, buffer, sizeof(buffer), &error), -EBADF);
    IS(ginnel_udp_path_mtu(socket), -EBADF);
    close_shard();

    /* A device with an MTU of 1,500 bytes. */
    config = memif_config("server", 1);
    IS(ginnel_open(config, &stack), 0);
    ginnel_config_free(config);
    IS(ginnel_enter(stack, 0, NULL), 0);
    peer.sin_addr.s_addr = htonl(0x0a090002);
    struct sockaddr_in any = { .sin_family = AF_INET };
    IS(ginnel_udp_bind((struct sockaddr *)&any, sizeof(any), 0, &socket), 0);
    IS(ginnel_udp_connect(socket, (struct sockaddr *)&peer, sizeof(peer)), 0);
    int mtu = ginnel_udp_path_mtu(socket);
    IS(mtu, 1500);
    IS(ginnel_udp_send(socket, buffer, (size_t)mtu - 28, NULL, 0, NULL, 0), 0);
    IS(ginnel_udp_send(socket, buffer, (size_t)mtu - 27, NULL, 0, NULL, 0), 0);
    IS(ginnel_udp_set_options(socket, &options), 0);
    IS(ginnel_udp_send(socket, buffer, (size_t)mtu - 28, NULL, 0, NULL, 0), 0);
    IS(ginnel_udp_send(socket, buffer, (size_t)mtu - 27, NULL, 0, NULL, 0), -EMSGSIZE);
    IS(ginnel_udp_recv_error(socket, NULL, 0, &error), 0);
    IS(error.error, EMSGSIZE);
    IS(error.info, 1500);
    IS(error.offender.ss_family, 0);
    close_shard();
}

static struct sockaddr_storage ipv4(uint32_t host, uint16_t port)
{
    struct sockaddr_storage storage;
    struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(port) };
    address.sin_addr.s_addr = htonl(host);
    memset(&storage, 0, sizeof(storage));
    memcpy(&storage, &address, sizeof(address));
    return storage;
}

#define SOCKADDR(storage) (struct sockaddr *)&(storage), sizeof(storage)

/* Sends a datagram to a group, and returns whether a socket of this shard received it. */
static int is_received(struct ginnel_udp sender, struct ginnel_udp member, struct sockaddr_storage group,
                       struct ginnel_datagram *datagram)
{
    char buffer[10];
    IS(ginnel_udp_send(sender, "group", 5, SOCKADDR(group), NULL, 0), 0);
    for (int i = 0; i < 5; i++)
        CHECK(ginnel_wait(NULL, &low, 2) >= 0);
    ssize_t len = ginnel_udp_recv(member, buffer, sizeof(buffer), datagram);
    IS(len, len == 5 ? 5 : -EAGAIN);
    return len == 5;
}

static void members_receive_multicast_of_their_sources(void)
{
    struct sockaddr_storage group = ipv4(0xef010203, 5000), any = ipv4(INADDR_ANY, 5000);
    struct sockaddr_storage own = ipv4(0x0a090001, 0), many[11];
    struct sockaddr_storage sources[2] = { ipv4(0x0a090009, 0), own };
    struct ginnel_udp_options options = { 0 };
    struct ginnel_datagram datagram;
    struct ginnel_udp member, sender;
    struct sockaddr_in6 source6 = { .sin6_family = AF_INET6 };
    config = memif_config("server", 1);
    IS(ginnel_open(config, &stack), 0);
    ginnel_config_free(config);
    IS(ginnel_enter(stack, 0, NULL), 0);
    IS(ginnel_udp_bind(SOCKADDR(any), 0, &member), 0);
    any = ipv4(INADDR_ANY, 0);
    IS(ginnel_udp_bind(SOCKADDR(any), 0, &sender), 0);
    IS(is_received(sender, member, group, &datagram), 0);
    /* Any source. */
    IS(ginnel_udp_set_membership(member, 0, SOCKADDR(group), GINNEL_SOURCES_EXCLUDE, NULL, 0), 0);
    IS(is_received(sender, member, group, &datagram), 1);
    IS(((struct sockaddr_in *)&datagram.to)->sin_addr.s_addr, htonl(0xef010203));
    IS(((struct sockaddr_in *)&datagram.from)->sin_addr.s_addr, htonl(0x0a090001));
    IS(datagram.hop_limit, 1);
    /* Given sources. The link of the group has the number 1. */
    IS(ginnel_udp_set_membership(member, 1, SOCKADDR(group), GINNEL_SOURCES_INCLUDE, sources, 1), 0);
    IS(is_received(sender, member, group, &datagram), 0);
    IS(ginnel_udp_set_membership(member, 1, SOCKADDR(group), GINNEL_SOURCES_INCLUDE, sources, 2), 0);
    IS(is_received(sender, member, group, &datagram), 1);
    IS(ginnel_udp_set_membership(member, 1, SOCKADDR(group), GINNEL_SOURCES_EXCLUDE, sources, 2), 0);
    IS(is_received(sender, member, group, &datagram), 0);
    IS(ginnel_udp_set_membership(member, 1, SOCKADDR(group), GINNEL_SOURCES_EXCLUDE, sources, 1), 0);
    IS(is_received(sender, member, group, &datagram), 1);
    /* Options of the sender. */
    options.multicast_v4 = (struct ginnel_multicast_options){ .hop_limit = 5, .link = 1 };
    IS(ginnel_udp_set_options(sender, &options), 0);
    IS(is_received(sender, member, group, &datagram), 1);
    IS(datagram.hop_limit, 5);
    options.multicast_v4 = (struct ginnel_multicast_options){ .flags = GINNEL_MULTICAST_THIS_HOST };
    IS(ginnel_udp_set_options(sender, &options), 0);
    IS(is_received(sender, member, group, &datagram), 1);
    IS(datagram.hop_limit, 0);
    options.multicast_v4 = (struct ginnel_multicast_options){ .flags = GINNEL_MULTICAST_NO_LOOP };
    IS(ginnel_udp_set_options(sender, &options), 0);
    IS(is_received(sender, member, group, &datagram), 0);
    options.multicast_v4.flags = 0;
    IS(ginnel_udp_set_options(sender, &options), 0);
    /* A socket that is no member receives what the host does, unless it wants its groups only. */
    IS(ginnel_udp_set_membership(sender, 1, SOCKADDR(group), GINNEL_SOURCES_EXCLUDE, NULL, 0), 0);
    IS(ginnel_udp_set_membership(member, 1, SOCKADDR(group), GINNEL_SOURCES_INCLUDE, NULL, 0), 0);
    IS(is_received(sender, member, group, &datagram), 1);
    options.multicast_v4.flags = GINNEL_MULTICAST_MEMBERS_ONLY;
    IS(ginnel_udp_set_options(member, &options), 0);
    IS(is_received(sender, member, group, &datagram), 0);

    options.multicast_v4.flags = 8;
    IS(ginnel_udp_set_options(sender, &options), -EINVAL);
    options.multicast_v4.flags = GINNEL_MULTICAST_THIS_HOST;
    options.multicast_v4.hop_limit = 5;
    IS(ginnel_udp_set_options(sender, &options), -EINVAL);
    IS(ginnel_udp_set_membership(member, 9, SOCKADDR(group), GINNEL_SOURCES_EXCLUDE, NULL, 0), -EINVAL);
    IS(ginnel_udp_set_membership(member, 1u << 16, SOCKADDR(group), 0, NULL, 0), -EINVAL);
    IS(ginnel_udp_set_membership(member, 1, SOCKADDR(own), GINNEL_SOURCES_EXCLUDE, NULL, 0), -EINVAL);
    IS(ginnel_udp_set_membership(member, 1, SOCKADDR(group), 2, NULL, 0), -EINVAL);
    IS(ginnel_udp_set_membership(member, 1, NULL, sizeof(group), 0, NULL, 0), -EFAULT);
    IS(ginnel_udp_set_membership(member, 1, SOCKADDR(group), GINNEL_SOURCES_INCLUDE, NULL, 1), -EFAULT);
    IS(ginnel_udp_set_membership(member, 1, SOCKADDR(group), 1, sources, SIZE_MAX), -EINVAL);
    memcpy(&sources[0], &source6, sizeof(source6));
    IS(ginnel_udp_set_membership(member, 1, SOCKADDR(group), GINNEL_SOURCES_INCLUDE, sources, 2), -EINVAL);
    sources[0].ss_family = AF_UNIX;
    IS(ginnel_udp_set_membership(member, 1, SOCKADDR(group), 1, sources, 2), -EAFNOSUPPORT);
    for (uint32_t i = 0; i < 11; i++)
        many[i] = ipv4(0x0a090010 + i, 0);
    IS(ginnel_udp_set_membership(member, 1, SOCKADDR(group), GINNEL_SOURCES_INCLUDE, many, 11), -ENOBUFS);
    IS(ginnel_udp_set_membership(member, 1, SOCKADDR(group), GINNEL_SOURCES_INCLUDE, many, 10), 0);
    IS(ginnel_udp_close(member), 0);
    IS(ginnel_udp_set_membership(member, 1, SOCKADDR(group), GINNEL_SOURCES_EXCLUDE, NULL, 0), -EBADF);
    close_shard();
    /* The loopback alone has no groups. */
    open_shard(NULL, NULL, NULL);
    IS(ginnel_udp_bind(ADDRESS(0), 0, &member), 0);
    IS(ginnel_udp_set_membership(member, 0, SOCKADDR(group), GINNEL_SOURCES_EXCLUDE, NULL, 0), -ENODEV);
    close_shard();
}

static void stop_flag_ends_the_wait_once(void)
{
    struct ginnel_stop *stop;
    IS(ginnel_stop_new(&stop), 0);
    open_shard(NULL, NULL, stop);
    IS(ginnel_timer_set(0, 1, NULL), 0);
    usleep(2000);
    ginnel_stop_set(stop);
    IS(expect(GINNEL_EV_TIMER).token, 1);
    IS(ginnel_wait(NULL, &low, -1), -ECANCELED);
    IS(ginnel_wait(NULL, &low, 1), 0);
    close_shard();
    ginnel_stop_free(stop);
}

static void events_without_room_are_kept(void)
{
    struct ginnel_events one = { low_room, 1, 0 };
    int seen = 0;
    open_shard(NULL, NULL, NULL);
    for (uint64_t i = 0; i < 100; i++)
        IS(ginnel_timer_set(1000, i, NULL), 0);
    while (seen < 100) {
        IS(ginnel_wait(NULL, &one, 5000), 1);
        IS(one.count, 1);
        CHECK(one.events[0].token < 100);
        seen++;
    }
    IS(ginnel_wait(NULL, &one, 0), 0);
    close_shard();
}

static void wrong_arguments_are_errors(void)
{
    struct ginnel_config *none = NULL;
    struct ginnel_listener listener;
    struct ginnel_conn conn = { 0 };
    struct ginnel_socket_options options = { .flags = 1 << 20 };
    struct ginnel_events no_room = { low_room, 0, 0 }, no_events = { NULL, 5, 0 };
    struct sockaddr_in any = address(PORT);
    struct ginnel_callbacks callbacks = { .size = 3 };
    uint32_t token;
    char buffer[10];
    IS(ginnel_config_file("/nonexistent.toml", &none), -EINVAL);
    CHECK(strstr(ginnel_error(), "/nonexistent.toml"));
    IS(ginnel_config_text("tcp.connections = 3", &none), -EINVAL);
    CHECK(strstr(ginnel_error(), "connections"));
    IS(ginnel_config_text(NULL, &none), -EFAULT);
    IS(ginnel_config_text("\xff", &none), -EILSEQ);
    IS(ginnel_config_text("", NULL), -EFAULT);
    CHECK(none == NULL);
    IS(ginnel_open(NULL, &stack), -EFAULT);
    IS(ginnel_enter(NULL, 0, NULL), -EFAULT);
    IS(ginnel_shards(NULL), -EFAULT);
    IS(ginnel_leave(), -EPERM);
    IS(ginnel_wait(NULL, &low, 0), -EPERM);
    IS(ginnel_listen(ADDRESS(PORT), NULL, &listener), -EPERM);
    CHECK(strstr(ginnel_error(), "ginnel_enter"));
    IS(ginnel_run(NULL, &callbacks, NULL, NULL), -EFAULT);
    IS(ginnel_config_text("shard.placement = \"split\"\nloopback = \"stack\"", &config), 0);
    IS(ginnel_open(config, &stack), -EOPNOTSUPP);
    IS(ginnel_run(config, NULL, NULL, NULL), -EFAULT);
    IS(ginnel_run(config, &callbacks, NULL, NULL), -EINVAL);
    callbacks.size = sizeof(callbacks);
    IS(ginnel_run(config, &callbacks, NULL, NULL), -EINVAL);
    CHECK(strstr(ginnel_error(), "data"));
    callbacks.size = sizeof(callbacks) + sizeof(void *);
    IS(ginnel_run(config, &callbacks, NULL, NULL), -EINVAL);
    ginnel_config_free(config);
    ginnel_config_free(NULL);
    ginnel_stop_set(NULL);
    ginnel_stop_free(NULL);
    ginnel_commander_free(NULL);
    ginnel_close(NULL);
    IS(ginnel_command(NULL, 1), -EFAULT);

    open_shard(NULL, NULL, NULL);
    IS(ginnel_enter(stack, 0, NULL), -EBUSY);
    IS(ginnel_enter(stack, 1, NULL), -EINVAL);
    IS(ginnel_wait(NULL, NULL, 0), -EFAULT);
    IS(ginnel_wait(&high, NULL, 0), -EFAULT);
    IS(ginnel_wait(NULL, &no_room, 0), -EINVAL);
    IS(ginnel_wait(NULL, &no_events, 0), -EFAULT);
    IS(ginnel_exit(), -EPERM);
    IS(ginnel_listen(NULL, 0, NULL, &listener), -EINVAL);
    IS(ginnel_listen(NULL, sizeof(any), NULL, &listener), -EFAULT);
    IS(ginnel_listen((struct sockaddr *)&any, 4, NULL, &listener), -EINVAL);
    IS(ginnel_listen((struct sockaddr *)&any, sizeof(any), NULL, NULL), -EFAULT);
    IS(ginnel_listen((struct sockaddr *)&any, sizeof(any), &options, &listener), -EINVAL);
    options.flags = 0;
    options.reserved[1] = 1;
    IS(ginnel_listen((struct sockaddr *)&any, sizeof(any), &options, &listener), -EINVAL);
    options.reserved[1] = 0;
    options.mss = 1;
    IS(ginnel_listen((struct sockaddr *)&any, sizeof(any), &options, &listener), -EINVAL);
    options = (struct ginnel_socket_options){ .backlog = 4 };
    IS(ginnel_connect(ADDRESS(PORT), NULL, 0, &options, &conn), -EINVAL);
    any.sin_family = AF_UNIX;
    IS(ginnel_listen((struct sockaddr *)&any, sizeof(any), NULL, &listener), -EAFNOSUPPORT);
    any.sin_family = AF_INET;
    any.sin_addr.s_addr = htonl(0x0a000001);
    IS(ginnel_listen((struct sockaddr *)&any, sizeof(any), NULL, &listener), -EADDRNOTAVAIL);
    IS(ginnel_listen(ADDRESS(PORT), NULL, &listener), 0);
    IS(ginnel_listen(ADDRESS(PORT), NULL, &listener), -EADDRINUSE);
    IS(ginnel_accept((struct ginnel_listener){ 0 }, &conn), -EBADF);
    /* Numbers that were never handles. */
    for (uint64_t id = 0; id < 70; id++)
        for (int high_bits = 0; high_bits < 2; high_bits++) {
            conn.id = high_bits ? id << 32 | 0xffffffff : id;
            IS(ginnel_send(conn, "x", 1), -EBADF);
            IS(ginnel_recv(conn, buffer, 1), -EBADF);
            IS(ginnel_conn_close(conn), -EBADF);
            IS(ginnel_conn_abort(conn), -EBADF);
            IS(ginnel_shutdown(conn), -EBADF);
            IS(ginnel_resume(conn), -EBADF);
            IS(ginnel_unread(conn), -EBADF);
            IS(ginnel_conn_token(conn, &token), -EBADF);
            IS(ginnel_conn_set_option(conn, GINNEL_OPT_NODELAY, 1), -EBADF);
            IS(ginnel_udp_close((struct ginnel_udp){ conn.id }), -EBADF);
        }
    struct ginnel_conn client, server;
    open_pair(listener, PORT, &client, &server);
    IS(ginnel_send(client, NULL, 1), -EFAULT);
    IS(ginnel_send(client, NULL, 0), 0);
    IS(ginnel_send(client, buffer, SIZE_MAX), -EINVAL);
    IS(ginnel_recv(client, NULL, 1), -EFAULT);
    IS(ginnel_recv_unordered(client, buffer, 1, NULL), -EFAULT);
    IS(ginnel_conn_info(client, NULL), -EFAULT);
    IS(ginnel_conn_info(client, (struct ginnel_info *)(buffer + 1)), -EFAULT);
    IS(ginnel_conn_set_option(client, 0, 1), -ENOPROTOOPT);
    IS(ginnel_conn_set_option(client, 999, 1), -ENOPROTOOPT);
    IS(ginnel_conn_set_option(client, GINNEL_OPT_KEEPIDLE_S, 0), -EINVAL);
    IS(ginnel_conn_set_option(client, GINNEL_OPT_KEEPIDLE_S, -1), -EINVAL);
    IS(ginnel_conn_set_option(client, GINNEL_OPT_PRIORITY, 8), -EINVAL);
    IS(ginnel_conn_set_option(client, GINNEL_OPT_PRIORITY, 7), 0);
    IS(ginnel_conn_set_option(client, GINNEL_OPT_RCVBUF, 1ll << 40), -EINVAL);
    close_shard();
    IS(ginnel_send(client, "x", 1), -EPERM);
}

static void a_stack_can_be_opened_again(void)
{
    for (int i = 0; i < 20; i++) {
        struct ginnel_listener listener;
        open_shard(NULL, NULL, NULL);
        IS(ginnel_listen(ADDRESS(PORT), NULL, &listener), 0);
        close_shard();
    }
    /* A stack whose shards nobody entered. */
    IS(ginnel_config_text(CONFIGURATION, &config), 0);
    IS(ginnel_open(config, &stack), 0);
    ginnel_close(stack);
    ginnel_config_free(config);
}

/* ---- Callbacks ---- */

enum { MESSAGE = 300000 };

struct application {
    struct ginnel_conn client;
    size_t sent, received, echoed;
    int accepted, connected, writable, closed, timers, ended, commands, stops;
    const uint8_t *kept;
};

static struct application program;
static struct ginnel_stop *program_stop;
static const char *mode;

static void *create(void *arg, unsigned application)
{
    IS(application, 0);
    CHECK(strcmp(arg, "argument") == 0);
    IS(ginnel_shard(), -EPERM);
    return &program;
}

static void send_more(struct application *app)
{
    static char bytes[MESSAGE];
    while (app->sent < MESSAGE) {
        size_t part = MESSAGE - app->sent < 50000 ? MESSAGE - app->sent : 50000;
        ssize_t sent = ginnel_send(app->client, bytes + app->sent, part);
        CHECK(sent >= 0);
        app->sent += (size_t)sent;
        if ((size_t)sent < part)
            return;
    }
    IS(ginnel_shutdown(app->client), 0);
}

static int start(void *user)
{
    struct application *app = user;
    struct ginnel_listener listener;
    struct ginnel_socket_options options = { .recv_buffer_bytes = 30000, .send_buffer_bytes = 30000 };
    if (strcmp(mode, "fails") == 0)
        return -ENOSPC;
    IS(ginnel_listen(ADDRESS(PORT), &options, &listener), 0);
    IS(ginnel_connect(ADDRESS(PORT), NULL, 0, &options, &app->client), 0);
    IS(ginnel_timer_set(1000000, 9, NULL), 0);
    return 0;
}

static void accepted(void *user, struct ginnel_conn conn, struct ginnel_listener listener)
{
    struct application *app = user;
    app->accepted++;
    CHECK(conn.id != 0 && listener.id != 0);
    IS(ginnel_class(), 1);
}

static void connected(void *user, struct ginnel_conn conn)
{
    struct application *app = user;
    app->connected++;
    IS(conn.id, app->client.id);
    send_more(app);
}

static size_t data(void *user, struct ginnel_conn conn, const uint8_t *bytes, size_t len)
{
    struct application *app = user;
    if (conn.id == app->client.id) {
        app->received += len;
        return len;
    }
    const uint8_t *lent;
    IS(ginnel_peek(conn, 0, &lent), -EOPNOTSUPP);
    IS(ginnel_consume(conn, 0), -EOPNOTSUPP);
    ssize_t sent = ginnel_send(conn, bytes, len);
    CHECK(sent >= 0);
    app->echoed += (size_t)sent;
    return (size_t)sent;
}

static void writable(void *user, struct ginnel_conn conn)
{
    struct application *app = user;
    app->writable++;
    if (conn.id == app->client.id)
        send_more(app);
    else
        IS(ginnel_resume(conn), 0);
}

static void closed(void *user, struct ginnel_conn conn, int error)
{
    struct application *app = user;
    uint32_t token;
    IS(error, 0);
    IS(ginnel_conn_token(conn, &token), 0);
    CHECK(ginnel_send(conn, "x", 1) < 0);
    if (++app->closed == 2 && app->timers == 1)
        ginnel_stop_set(program_stop);
}

static void timer(void *user, uint64_t token)
{
    struct application *app = user;
    IS(token, 9);
    app->timers++;
    if (app->closed == 2)
        ginnel_stop_set(program_stop);
}

static void stopping(void *user)
{
    struct application *app = user;
    app->stops++;
    IS(ginnel_exit(), 0);
}

static void ended(void *user)
{
    struct application *app = user;
    app->ended++;
    IS(ginnel_exit(), -EPERM);
}

static void run_callbacks(const char *configuration)
{
    struct ginnel_callbacks callbacks = {
        .size = sizeof(callbacks),
        .create = create,
        .start = start,
        .accepted = accepted,
        .connected = connected,
        .data = data,
        .writable = writable,
        .closed = closed,
        .timer = timer,
        .stopping = stopping,
        .ended = ended,
    };
    char text[300];
    snprintf(text, sizeof(text), "%s%s", CONFIGURATION, configuration);
    IS(ginnel_config_text(text, &config), 0);
    IS(ginnel_stop_new(&program_stop), 0);
    int result = ginnel_run(config, &callbacks, "argument", program_stop);
    IS(program.ended, 1);
    if (strcmp(mode, "fails") == 0) {
        IS(result, -ENOSPC);
        return;
    }
    IS(result, 0);
    IS(program.accepted, 1);
    IS(program.connected, 1);
    IS(program.sent, MESSAGE);
    IS(program.echoed, MESSAGE);
    IS(program.received, MESSAGE);
    IS(program.closed, 2);
    IS(program.timers, 1);
    IS(program.stops, 1);
    CHECK(program.writable > 0);
    ginnel_stop_free(program_stop);
    ginnel_config_free(config);
}

/* Callbacks that receive a stream. */
static int start_receiver(void *user)
{
    struct ginnel_socket_options options = LARGE_WINDOW;
    struct sockaddr_in receiver = receiver_address();
    struct ginnel_listener listener;
    options.flags = *(int *)user ? GINNEL_UNORDERED : 0;
    IS(ginnel_listen((struct sockaddr *)&receiver, sizeof(receiver), &options, &listener), 0);
    return 0;
}

static void ask_for_stream(void *user, struct ginnel_conn conn, struct ginnel_listener listener)
{
    (void)user;
    (void)listener;
    IS(ginnel_send(conn, "1", 1), 1);
}

static void confirm_stream(struct ginnel_conn conn)
{
    if (taken.total == STREAM)
        IS(ginnel_send(conn, "2", 1), 1);
}

static size_t stream_data(void *user, struct ginnel_conn conn, const uint8_t *bytes, size_t len)
{
    (void)user;
    take_in_order(bytes, len);
    confirm_stream(conn);
    return len;
}

static void stream_early(void *user, struct ginnel_conn conn, size_t ahead, const uint8_t *bytes, size_t len)
{
    (void)user;
    take_early(ahead, bytes, len);
    confirm_stream(conn);
}

static void early_bytes_reach_their_callback(void)
{
    for (int on = 1; on >= 0; on--) {
        struct ginnel_callbacks callbacks = {
            .size = sizeof(callbacks),
            .start = start_receiver,
            .accepted = ask_for_stream,
            .data = stream_data,
            .unordered = stream_early,
        };
        configure_receiver();
        pthread_t thread = begin_stream();
        IS(ginnel_run(config, &callbacks, &on, receiver_stop), 0);
        end_stream(thread, on);
    }
}

/* Callbacks that receive an urgent byte: "ab", '!', "cd". */
static struct {
    char bytes[10];
    size_t len;
    int urgent, taken;
} marked;

static int start_marked(void *user)
{
    struct ginnel_listener listener;
    struct ginnel_conn conn;
    (void)user;
    IS(ginnel_listen(ADDRESS(PORT), NULL, &listener), 0);
    IS(ginnel_connect(ADDRESS(PORT), NULL, 0, NULL, &conn), 0);
    return 0;
}

static void send_marked(void *user, struct ginnel_conn conn)
{
    (void)user;
    IS(ginnel_send_urgent(conn, "ab!", 3), 3);
    IS(ginnel_send(conn, "cd", 2), 2);
}

static void stop_if_marked(void)
{
    if (marked.len == 4 && marked.taken)
        IS(ginnel_exit(), 0);
}

static size_t marked_data(void *user, struct ginnel_conn conn, const uint8_t *bytes, size_t len)
{
    (void)user;
    (void)conn;
    CHECK(marked.len + len <= 4);
    memcpy(marked.bytes + marked.len, bytes, len);
    marked.len += len;
    stop_if_marked();
    return len;
}

static void marked_urgent(void *user, struct ginnel_conn conn, int32_t ahead, int byte)
{
    (void)user;
    CHECK(ahead <= 2);
    if (byte == -1)
        return;
    IS(byte, '!');
    marked.urgent++;
    IS(ginnel_recv_urgent(conn), '!');
    marked.taken = 1;
    stop_if_marked();
}

static void urgent_byte_reaches_its_callback(void)
{
    struct ginnel_callbacks callbacks = {
        .size = sizeof(callbacks),
        .start = start_marked,
        .connected = send_marked,
        .data = marked_data,
        .urgent = marked_urgent,
    };
    IS(ginnel_config_text(CONFIGURATION, &config), 0);
    IS(ginnel_run(config, &callbacks, NULL, NULL), 0);
    IS(marked.urgent, 1);
    CHECK(memcmp(marked.bytes, "abcd", 4) == 0);
    ginnel_config_free(config);
}

static void callbacks_carry_bytes(void)
{
    run_callbacks("");
}

static void callbacks_run_in_a_thread_of_their_own(void)
{
    run_callbacks("shard.placement = \"split\"\n");
}

static void a_start_that_fails_ends_the_stack(void)
{
    mode = "fails";
    run_callbacks("");
}

#define CASE(name) { #name, name }

static const struct {
    const char *name;
    void (*run)(void);
} CASES[] = {
    CASE(loop_carries_bytes),
    CASE(bytes_before_the_end_are_received),
    CASE(large_transfer_needs_all_events),
    CASE(bytes_are_lent_until_they_are_consumed),
    CASE(stream_ends_after_an_urgent_byte),
    CASE(lent_bytes_outlive_a_reset),
    CASE(large_transfer_is_read_in_place),
    CASE(urgent_events_are_in_their_own_list),
    CASE(early_bytes_are_received_unordered),
    CASE(messages_overtake_each_other),
    CASE(urgent_bytes_are_received_out_of_band),
    CASE(fast_open_carries_data_in_the_syn),
    CASE(listener_options_are_applied),
    CASE(connection_options_are_applied),
    CASE(memory_is_sent_without_a_copy),
    CASE(source_outlives_its_connection),
    CASE(timers_descriptors_and_commands_wake_the_shard),
    CASE(exact_timers_expire_in_order),
    CASE(shard_answers_questions),
    CASE(datagrams_are_carried),
    CASE(udp_options_are_applied),
    CASE(udp_segments_are_sent_and_joined),
    CASE(errors_about_datagrams_are_queued),
    CASE(members_receive_multicast_of_their_sources),
    CASE(stop_flag_ends_the_wait_once),
    CASE(events_without_room_are_kept),
    CASE(wrong_arguments_are_errors),
    CASE(a_stack_can_be_opened_again),
    CASE(callbacks_carry_bytes),
    CASE(urgent_byte_reaches_its_callback),
    CASE(early_bytes_reach_their_callback),
    CASE(callbacks_run_in_a_thread_of_their_own),
    CASE(a_start_that_fails_ends_the_stack),
};

int main(int argc, char **argv)
{
    mode = "";
    for (size_t i = 0; argc == 2 && i < sizeof(CASES) / sizeof(*CASES); i++)
        if (strcmp(argv[1], CASES[i].name) == 0) {
            CASES[i].run();
            return 0;
        }
    fprintf(stderr, "usage: driver CASE\n");
    return 2;
}
