/* Runs the case that the command line names. */
#include "driver.h"

int main(int argc, char **argv)
{
    const struct test_case *lists[] = { CONNECTIONS_CASES, IN_PLACE_CASES, UNORDERED_CASES, URGENT_CASES,
                                        DATAGRAMS_CASES, SHARDS_CASES, CALLBACKS_CASES };
    for (size_t i = 0; argc == 2 && i < sizeof(lists) / sizeof(*lists); i++)
        for (const struct test_case *one = lists[i]; one->name; one++)
            if (strcmp(argv[1], one->name) == 0) {
                one->run();
                return 0;
            }
    fprintf(stderr, "usage: driver CASE\n");
    return 2;
}
