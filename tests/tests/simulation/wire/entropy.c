/*
 * Preloaded into the process of one simulated run: what the system would draw at random follows from TENURE_ENTROPY, and
 * the wall clock stands still. Each thread draws from the start again, so that it does not matter which one was first.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

static __thread uint64_t state;
static __thread int seeded;

static uint64_t draw(void)
{
	if (!seeded) {
		const char *seed = getenv("TENURE_ENTROPY");
		state = seed ? strtoull(seed, NULL, 10) : 0;
		seeded = 1;
	}
	state += 0x9e3779b97f4a7c15u;
	uint64_t mixed = state;
	mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9u;
	mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebu;
	return mixed ^ (mixed >> 31);
}

ssize_t getrandom(void *buffer, size_t length, unsigned int flags)
{
	unsigned char *bytes = buffer;
	(void)flags;
	for (size_t at = 0; at < length; at++)
		bytes[at] = (unsigned char)draw();
	return (ssize_t)length;
}

int clock_gettime(clockid_t clock, struct timespec *time)
{
	if (clock == CLOCK_REALTIME) {
		time->tv_sec = 1800000000;
		time->tv_nsec = 0;
		return 0;
	}
	return (int)syscall(SYS_clock_gettime, clock, time);
}
