/* A server with a loop of its own, which waits in two levels: it answers each line with the level at which
 * the line arrived. Lines that begin with '!' are urgent, as far as they begin a segment.
 *
 *   cc -o levels levels.c -pthread $(pkg-config --cflags --libs ginnel)
 *   ./levels tap.toml 7
 */
#include <arpa/inet.h>
#include <errno.h>
#include <ginnel.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { EVENTS = 64 };

static struct ginnel_stop *stop;
static struct ginnel_stack *stack;
static uint16_t port;

static void on_signal(int number)
{
    (void)number;
    ginnel_stop_set(stop);
}

static void check(int result, const char *what)
{
    if (result < 0) {
        fprintf(stderr, "levels: %s: %s\n", what, ginnel_error());
        exit(1);
    }
}

/* Gives frames whose payload begins with '!' the priority 6. */
static uint8_t classify(void *arg, const struct ginnel_packet *packet, uint8_t usual)
{
    (void)arg;
    return !packet->transmits && packet->payload_len > 0 && packet->payload[0] == '!' ? 6 : usual;
}

static void answer(const struct ginnel_event *event, const char *level)
{
    struct ginnel_conn conn = ginnel_event_conn(event);
    if (event->events & GINNEL_EV_INCOMING)
        while (ginnel_accept(ginnel_event_listener(event), &conn) == 0)
            ;
    else if (event->events & (GINNEL_EV_READABLE | GINNEL_EV_PEER_CLOSED)) {
        const uint8_t *data;
        ssize_t len;
        while ((len = ginnel_peek(conn, 0, &data)) > 0) {
            for (const uint8_t *end = memchr(data, '\n', (size_t)len); end;
                 end = memchr(end + 1, '\n', (size_t)(data + len - end - 1)))
                ginnel_send(conn, level, strlen(level));
            ginnel_consume(conn, (size_t)len);
        }
        if (len == 0)
            ginnel_conn_close(conn);
    }
}

static void *serve(void *arg)
{
    struct sockaddr_in any = { .sin_family = AF_INET, .sin_port = htons(port) };
    struct ginnel_event high_events[EVENTS], low_events[EVENTS];
    struct ginnel_events high = { .events = high_events, .max = EVENTS };
    struct ginnel_events low = { .events = low_events, .max = EVENTS };
    struct ginnel_listener listener;
    check(ginnel_enter(stack, (unsigned)(size_t)arg, stop), "shard");
    check(ginnel_listen((struct sockaddr *)&any, sizeof(any), NULL, &listener), "listen");
    fprintf(stderr, "levels: shard %d is ready\n", ginnel_shard());
    int count;
    while ((count = ginnel_wait(&high, &low, -1)) >= 0) {
        for (size_t i = 0; i < high.count; i++)
            answer(&high.events[i], "high\n");
        for (size_t i = 0; i < low.count; i++)
            answer(&low.events[i], "low\n");
    }
    if (count != -ECANCELED)
        check(count, "wait");
    check(ginnel_leave(), "leave");
    return NULL;
}

int main(int argc, char **argv)
{
    if (argc != 3 || (port = (uint16_t)atoi(argv[2])) == 0) {
        fprintf(stderr, "usage: levels CONFIGURATION PORT\n");
        return 2;
    }
    struct ginnel_config *config;
    check(ginnel_config_file(argv[1], &config), "configuration");
    check(ginnel_config_classifier(config, classify, NULL), "classifier");
    check(ginnel_stop_new(&stop), "stop flag");
    struct sigaction action = { .sa_handler = on_signal };
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGINT, &action, NULL);
    check(ginnel_open(config, &stack), "stack");
    int shards = ginnel_shards(stack);
    pthread_t threads[64];
    for (int i = 0; i < shards; i++)
        if (pthread_create(&threads[i], NULL, serve, (void *)(size_t)i) != 0)
            return 1;
    for (int i = 0; i < shards; i++)
        pthread_join(threads[i], NULL);
    ginnel_close(stack);
    ginnel_config_free(config);
    return 0;
}
