/* UDP sockets. */
#include "driver.h"

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

const struct test_case DATAGRAMS_CASES[] = {
    CASE(datagrams_are_carried),
    CASE(udp_options_are_applied),
    CASE(udp_segments_are_sent_and_joined),
    CASE(errors_about_datagrams_are_queued),
    CASE(members_receive_multicast_of_their_sources),
    { NULL, NULL },
};
