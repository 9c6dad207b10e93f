// Unordered receive and unordered send of a program, with the functions of docs/unordered.md, which the test
// copies to unordered_example.c. Prints the place of the urgent message in the stream. It is sent last, while
// the receive window is closed, so that it can only overtake what is queued.
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "unordered_example.c"

#define MESSAGES 1000
#define MESSAGE_BYTES 400

static void check(int is_good, const char *what)
{
    if (!is_good) {
        printf("%s: %s\n", what, strerror(errno));
        exit(1);
    }
}

int main(void)
{
    struct sockaddr_in at = { .sin_family = AF_INET, .sin_port = htons(7100) };
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int on = 1, receive_bytes = 16384, send_bytes = 1 << 20;
    int listener = socket(AF_INET, SOCK_STREAM, 0), sender = socket(AF_INET, SOCK_STREAM, 0);
    check(setsockopt(listener, SOL_GINNEL, GINNEL_UNORDERED_RECV, &on, sizeof(on)) == 0, "unordered receive");
    check(setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) == 0, "SO_REUSEADDR");
    check(setsockopt(listener, SOL_SOCKET, SO_RCVBUF, &receive_bytes, sizeof(int)) == 0, "SO_RCVBUF");
    check(setsockopt(sender, SOL_SOCKET, SO_SNDBUF, &send_bytes, sizeof(int)) == 0, "SO_SNDBUF");
    check(bind(listener, (struct sockaddr *)&at, sizeof(at)) == 0, "bind");
    check(listen(listener, 1) == 0, "listen");
    // The kernel, which has part of a wildcard address, does not know the option.
    struct sockaddr_in any = { .sin_family = AF_INET };
    int wildcard = socket(AF_INET, SOCK_STREAM, 0);
    check(setsockopt(wildcard, SOL_GINNEL, GINNEL_UNORDERED_RECV, &on, sizeof(on)) == 0, "wildcard option");
    check(bind(wildcard, (struct sockaddr *)&any, sizeof(any)) == 0, "bind to a wildcard address");
    check(listen(wildcard, 1) == 0, "listen on a wildcard address");
    check(connect(sender, (struct sockaddr *)&at, sizeof(at)) == 0, "connect");
    int receiver = accept(listener, NULL, NULL);
    check(receiver >= 0, "accept");
    int value = 0;
    socklen_t len = sizeof(value);
    check(getsockopt(receiver, SOL_GINNEL, GINNEL_UNORDERED_RECV, &value, &len) == 0 && value == 1, "inherited");
    check(setsockopt(sender, SOL_GINNEL, GINNEL_UNORDERED_SEND, &on, sizeof(on)) == 0, "unordered send");

    char message[MESSAGE_BYTES];
    for (int number = 0; number < MESSAGES; number++) {
        for (size_t i = 0; i < sizeof(message); i += sizeof(number)) memcpy(message + i, &number, sizeof(number));
        int priority = number == MESSAGES - 1 ? 6 : 0;
        check(send_message(sender, message, sizeof(message), priority) == sizeof(message), "send_message");
    }
    check(shutdown(sender, SHUT_WR) == 0, "shutdown");

    static char stream[MESSAGES * MESSAGE_BYTES];
    static int times[MESSAGES * MESSAGE_BYTES];
    uint64_t offset = 0;
    ssize_t count;
    char part[777];
    while ((count = recv_at(receiver, part, sizeof(part), &offset)) > 0) {
        check(offset + count <= sizeof(stream), "offset");
        memcpy(stream + offset, part, count);
        for (ssize_t i = 0; i < count; i++) times[offset + i]++;
    }
    check(count == 0, "recv_at");
    int number, expected = 0;
    for (size_t i = 0; i < sizeof(stream); i++) check(times[i] == 1, "each byte once");
    for (int place = 0; place < MESSAGES; place++) {
        const char *found = stream + place * MESSAGE_BYTES;
        memcpy(&number, found, sizeof(number));
        check(memcmp(found, found + sizeof(number), MESSAGE_BYTES - sizeof(number)) == 0, "whole messages");
        if (number == MESSAGES - 1) printf("%d\n", place);
        else check(number == expected++, "the order of the others");
    }
    return 0;
}
