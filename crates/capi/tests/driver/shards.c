/* What a shard does besides its sockets: timers, commands, waits, questions. */
#include "driver.h"

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
        struct ginnel_events one = { low.events, 1, 0 };
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
    struct ginnel_events one = { low.events, 1, 0 };
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
    struct ginnel_events no_room = { low.events, 0, 0 }, no_events = { NULL, 5, 0 };
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

const struct test_case SHARDS_CASES[] = {
    CASE(timers_descriptors_and_commands_wake_the_shard),
    CASE(exact_timers_expire_in_order),
    CASE(shard_answers_questions),
    CASE(stop_flag_ends_the_wait_once),
    CASE(events_without_room_are_kept),
    CASE(wrong_arguments_are_errors),
    CASE(a_stack_can_be_opened_again),
    { NULL, NULL },
};
