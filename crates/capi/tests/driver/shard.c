/* A shard with a loop, which the cases drive. */
#include "driver.h"

struct ginnel_config *config;
struct ginnel_stack *stack;
static struct ginnel_event high_room[ROOM], low_room[ROOM];
struct ginnel_events high = { high_room, ROOM, 0 }, low = { low_room, ROOM, 0 };

struct sockaddr_in address(uint16_t port)
{
    struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(port) };
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return address;
}

void open_configured(const char *lines, ginnel_classifier classifier, void *arg,
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

void open_shard(ginnel_classifier classifier, void *arg, struct ginnel_stop *stop)
{
    open_configured("", classifier, arg, stop);
}

void close_shard(void)
{
    IS(ginnel_leave(), 0);
    ginnel_close(stack);
}

struct ginnel_event *find(struct ginnel_events *list, uint32_t events)
{
    for (size_t i = 0; i < list->count; i++)
        if (list->events[i].events & events)
            return &list->events[i];
    return NULL;
}

struct ginnel_event expect(uint32_t events)
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

void open_pair(struct ginnel_listener listener, uint16_t port, struct ginnel_conn *client,
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

void receive(struct ginnel_conn conn, char *buffer, size_t len)
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

int happens(uint32_t events)
{
    int found = 0;
    for (int i = 0; i < 10; i++) {
        CHECK(ginnel_wait(NULL, &low, 3) >= 0);
        found |= find(&low, events) != NULL;
    }
    return found;
}

uint8_t exclamations(void *arg, const struct ginnel_packet *packet, uint8_t usual)
{
    ++*(int *)arg;
    CHECK(packet->frame && packet->frame_len > packet->payload_len);
    return packet->payload_len > 0 && packet->payload[0] == '!' ? 6 : usual;
}

struct ginnel_config *memif_config(const char *role, int host)
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

struct ginnel_udp connected_socket(uint16_t port)
{
    struct ginnel_udp socket;
    IS(ginnel_udp_bind(ADDRESS(0), 0, &socket), 0);
    IS(ginnel_udp_connect(socket, ADDRESS(port)), 0);
    return socket;
}
