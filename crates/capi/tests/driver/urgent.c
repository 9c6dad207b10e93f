/* Urgent packets, and urgent data. */
#include "driver.h"

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
    struct ginnel_events one = { low.events, 1, 0 };
    IS(ginnel_send(client[0], "usual", 5), 5);
    IS(ginnel_send(client[1], "!urgent", 7), 7);
    IS(ginnel_wait(NULL, &one, 5000), 1);
    IS(one.events[0].source, server[1].id);
    IS(ginnel_wait(NULL, &one, 5000), 1);
    IS(one.events[0].source, server[0].id);
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

const struct test_case URGENT_CASES[] = {
    CASE(stream_ends_after_an_urgent_byte),
    CASE(urgent_events_are_in_their_own_list),
    CASE(urgent_bytes_are_received_out_of_band),
    CASE(urgent_byte_reaches_its_callback),
    { NULL, NULL },
};
