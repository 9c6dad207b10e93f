// Forks, and prints how often the child and the parent have allocated meanwhile.
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);

static volatile int is_counting, count;

void *malloc(size_t size)
{
    count += is_counting;
    return __libc_malloc(size);
}

void *calloc(size_t number, size_t size)
{
    count += is_counting;
    return __libc_calloc(number, size);
}

void *realloc(void *memory, size_t size)
{
    count += is_counting;
    return __libc_realloc(memory, size);
}

int main(void)
{
    int status;
    is_counting = 1;
    pid_t child = fork();
    is_counting = 0;
    if (child == 0) _exit(count);
    if (waitpid(child, &status, 0) != child) return 1;
    printf("child: %d, parent: %d\n", WEXITSTATUS(status), count);
    return 0;
}
