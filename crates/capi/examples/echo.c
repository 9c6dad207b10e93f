/* An echo server for TCP and UDP, by callbacks: received bytes are read where the device put them, and
 * copied once, into the send buffer.
 *
 *   cc -o echo echo.c $(pkg-config --cflags --libs ginnel)
 *   ./echo tap.toml 7
 *
 * Ends at SIGTERM and SIGINT.
 */
#include <arpa/inet.h>
#include <ginnel.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct ginnel_stop *stop;
static uint16_t port;

static void on_signal(int number)
{
    (void)number;
    ginnel_stop_set(stop);
}

/* Prints the error and ends the program if a call has failed. */
static void check(int result, const char *what)
{
    if (result < 0) {
        fprintf(stderr, "echo: %s: %s\n", what, ginnel_error());
        exit(1);
    }
}

static int start(void *user)
{
    struct sockaddr_in any = { .sin_family = AF_INET, .sin_port = htons(port) };
    struct ginnel_socket_options options = { .flags = GINNEL_NODELAY };
    struct ginnel_listener listener;
    struct ginnel_udp socket;
    int result = ginnel_listen((struct sockaddr *)&any, sizeof(any), &options, &listener);
    /* The shard that binds gets the datagrams of all shards. A second bind of the port would fail. */
    if (result == 0 && ginnel_shard() == 0)
        result = ginnel_udp_bind((struct sockaddr *)&any, sizeof(any), 0, &socket);
    if (result == 0)
        fprintf(stderr, "echo: shard %d is ready\n", ginnel_shard());
    (void)user;
    return result;
}

static size_t on_data(void *user, struct ginnel_conn conn, const uint8_t *data, size_t len)
{
    (void)user;
    ssize_t sent = ginnel_send(conn, data, len);
    /* What finds no room stays in the receive buffer, and the sender waits. */
    return sent < 0 ? len : (size_t)sent;
}

static void on_writable(void *user, struct ginnel_conn conn)
{
    (void)user;
    ginnel_resume(conn);
}

static void on_datagram(void *user, struct ginnel_udp socket, const struct ginnel_datagram *datagram,
                        const uint8_t *data, size_t len)
{
    (void)user;
    /* A datagram that cannot be sent is lost, as in the network. */
    ginnel_udp_send(socket, data, len, (const struct sockaddr *)&datagram->from, sizeof(datagram->from),
                    (const struct sockaddr *)&datagram->to, sizeof(datagram->to));
}

int main(int argc, char **argv)
{
    if (argc != 3 || (port = (uint16_t)atoi(argv[2])) == 0) {
        fprintf(stderr, "usage: echo CONFIGURATION PORT\n");
        return 2;
    }
    struct ginnel_config *config;
    check(ginnel_config_file(argv[1], &config), "configuration");
    check(ginnel_stop_new(&stop), "stop flag");
    struct sigaction action = { .sa_handler = on_signal };
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGINT, &action, NULL);
    struct ginnel_callbacks callbacks = {
        .size = sizeof(callbacks),
        .start = start,
        .data = on_data,
        .writable = on_writable,
        .datagram = on_datagram,
    };
    check(ginnel_run(config, &callbacks, NULL, stop), "stack");
    ginnel_stop_free(stop);
    ginnel_config_free(config);
    return 0;
}
