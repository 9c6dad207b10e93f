/* Callbacks instead of a loop. */
#include "driver.h"

enum { MESSAGE = 300000 };

struct application {
    struct ginnel_conn client;
    size_t sent, received, echoed;
    int accepted, connected, writable, closed, timers, ended, commands, stops;
    const uint8_t *kept;
};

static struct application program;
static struct ginnel_stop *program_stop;
static const char *mode = "";

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

const struct test_case CALLBACKS_CASES[] = {
    CASE(callbacks_carry_bytes),
    CASE(callbacks_run_in_a_thread_of_their_own),
    CASE(a_start_that_fails_ends_the_stack),
    { NULL, NULL },
};
