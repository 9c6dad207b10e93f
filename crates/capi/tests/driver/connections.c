/* Connections, their options, and memory that is sent without a copy. */
#include "driver.h"

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
    IS(ginnel_source_release(source), -EBADF);
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

const struct test_case CONNECTIONS_CASES[] = {
    CASE(loop_carries_bytes),
    CASE(bytes_before_the_end_are_received),
    CASE(large_transfer_needs_all_events),
    CASE(fast_open_carries_data_in_the_syn),
    CASE(listener_options_are_applied),
    CASE(connection_options_are_applied),
    CASE(memory_is_sent_without_a_copy),
    CASE(source_outlives_its_connection),
    { NULL, NULL },
};
