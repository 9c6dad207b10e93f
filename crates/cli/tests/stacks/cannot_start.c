/* A version of ginnel that accepts the options of a stack and cannot start its shards. */
#include "version.h" /* WORDS: what the version prints of itself */
#include <stdio.h>
#include <string.h>

int main(int count, char **words)
{
	for (int i = 1; i < count; i++)
		if (!strcmp(words[i], "--check-shards")) {
			puts(WORDS);
			return 0;
		}
	return 1;
}
