/* Receive in place: bytes are lent until they are consumed. */
#include "driver.h"

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

const struct test_case IN_PLACE_CASES[] = {
    CASE(bytes_are_lent_until_they_are_consumed),
    CASE(lent_bytes_outlive_a_reset),
    CASE(large_transfer_is_read_in_place),
    { NULL, NULL },
};
