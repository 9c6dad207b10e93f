/* What the sources of the driver share. Its cases are run by tests/driver.rs: each is a stack whose loopback
 * is inside it, and both ends of its connections. */
#ifndef DRIVER_H
#define DRIVER_H

#include <arpa/inet.h>
#include <errno.h>
#include <ginnel.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CHECK(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "%s:%d: %s (%s)\n", __FILE__, __LINE__, #condition, ginnel_error()); \
            exit(1); \
        } \
    } while (0)
#define IS(value, expected) \
    do { \
        long long value_ = (long long)(value); \
        if (value_ != (long long)(expected)) { \
            fprintf(stderr, "%s:%d: %s is %lld, not %s (%s)\n", __FILE__, __LINE__, #value, value_, \
                    #expected, ginnel_error()); \
            exit(1); \
        } \
    } while (0)

enum { ROOM = 32, PORT = 7 };

#define CONFIGURATION "loopback = \"stack\"\nrun.directory = false\nshard.spin_us = 0\n"

/* Returns an address of the loopback. */
struct sockaddr_in address(uint16_t port);

#define ADDRESS(port) (struct sockaddr *)&(struct sockaddr_in[]){ address(port) }, sizeof(struct sockaddr_in)

extern struct ginnel_config *config;
extern struct ginnel_stack *stack;
extern struct ginnel_events high, low;

/* Opens a shard with more lines of configuration. */
void open_configured(const char *lines, ginnel_classifier classifier, void *arg, struct ginnel_stop *stop);
void open_shard(ginnel_classifier classifier, void *arg, struct ginnel_stop *stop);
void close_shard(void);

/* Returns the event of the list that has one of these bits, or NULL. */
struct ginnel_event *find(struct ginnel_events *list, uint32_t events);
/* Waits until an event with one of these bits is in low. Other events are passed over. */
struct ginnel_event expect(uint32_t events);
/* Drives the shard for some milliseconds. Returns whether an event with one of these bits happened. */
int happens(uint32_t events);

/* Opens a connection to a listener of this shard. */
void open_pair(struct ginnel_listener listener, uint16_t port, struct ginnel_conn *client,
               struct ginnel_conn *server);
/* Receives this many bytes. */
void receive(struct ginnel_conn conn, char *buffer, size_t len);

/* Opens a socket that is connected to a port of this shard. */
struct ginnel_udp connected_socket(uint16_t port);

/* Makes packets urgent whose payload begins with an exclamation mark, and counts its calls. */
uint8_t exclamations(void *arg, const struct ginnel_packet *packet, uint8_t usual);

/* The two ends of a memif, which carries each segment in a frame of its own. On the loopback and on devices
 * with offloads, all that is sent at once is a single frame. */
struct ginnel_config *memif_config(const char *role, int host);

/* A case of the driver. A list ends with one without a name. */
struct test_case {
    const char *name;
    void (*run)(void);
};

#define CASE(name) { #name, name }

extern const struct test_case CONNECTIONS_CASES[], IN_PLACE_CASES[], UNORDERED_CASES[],
    URGENT_CASES[], DATAGRAMS_CASES[], SHARDS_CASES[], CALLBACKS_CASES[];

#endif
