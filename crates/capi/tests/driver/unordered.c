/* Unordered receive, with a loop and with callbacks. */
#include "driver.h"

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

const struct test_case UNORDERED_CASES[] = {
    CASE(early_bytes_are_received_unordered),
    CASE(messages_overtake_each_other),
    CASE(early_bytes_reach_their_callback),
    { NULL, NULL },
};
