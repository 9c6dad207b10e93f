/* A version of ginnel that differs in what it prints of itself. */
#include "version.h" /* WORDS: what the version prints of itself; GINNEL: the path of ginnel */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

int main(int count, char **words)
{
	for (int i = 1; i < count; i++)
		if (!strcmp(words[i], "--check-shards")) {
			puts(WORDS);
			return 0;
		}
	execv(GINNEL, words);
	return 1;
}
