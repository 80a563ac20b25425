/* See shim.h. */
#define _GNU_SOURCE
#include "shim.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

#include <rte_dev.h>
#include <rte_eal.h>
#include <rte_errno.h>
#include <rte_log.h>
#include <rte_memory.h>
#include <rte_vfio.h>

/* ---- log -------------------------------------------------------------------------------------------------- */

static ssize_t log_write(void *cookie, const char *text, size_t size)
{
	int level = rte_log_cur_msg_loglevel();
	const char *end = text + size;

	(void)cookie;
	while (text < end) {
		const char *newline = memchr(text, '\n', (size_t)(end - text));
		const char *stop = newline == NULL ? end : newline;

		if (stop > text)
			offcore_dpdk_log(level < 0 ? RTE_LOG_INFO : (uint32_t)level, text, (size_t)(stop - text));
		text = newline == NULL ? end : newline + 1;
	}
	return (ssize_t)size;
}

static int take_log(void)
{
	static FILE *stream;
	cookie_io_functions_t functions = { .write = log_write };

	if (stream == NULL) {
		stream = fopencookie(NULL, "w", functions);
		if (stream == NULL)
			return -errno;
		setvbuf(stream, NULL, _IOLBF, BUFSIZ);
	}
	return rte_openlog_stream(stream);
}

/* ---- start-up --------------------------------------------------------------------------------------------- */

/* Redirects stdout and stderr: the EAL prints its usage to stdout, and getopt prints errors to stderr. */
static int init_quietly(int argc, char **argv, int said)
{
	int out = dup(STDOUT_FILENO), err = dup(STDERR_FILENO);
	int rc;

	fflush(stdout);
	if (out >= 0)
		dup2(said, STDOUT_FILENO);
	if (err >= 0)
		dup2(said, STDERR_FILENO);
	rc = rte_eal_init(argc, argv);
	if (rc < 0)
		rc = rte_errno > 0 ? -rte_errno : -EIO;
	fflush(stdout);
	if (out >= 0) {
		dup2(out, STDOUT_FILENO);
		close(out);
	}
	if (err >= 0) {
		dup2(err, STDERR_FILENO);
		close(err);
	}
	return rc < 0 ? rc : 0;
}

int off_eal_init(int argc, char **argv, int said)
{
	sigset_t all, signals;
	cpu_set_t cpus;
	bool pinned;
	int rc = take_log();

	if (rc < 0)
		return rc;
	/* New threads inherit the mask, so only the process's present threads receive signals. */
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &signals);
	pinned = pthread_getaffinity_np(pthread_self(), sizeof(cpus), &cpus) == 0;
	rc = init_quietly(argc, argv, said);
	if (pinned)
		pthread_setaffinity_np(pthread_self(), sizeof(cpus), &cpus);
	pthread_sigmask(SIG_SETMASK, &signals, NULL);
	/* The directory is empty without a shared configuration, and if the EAL did not start. */
	rmdir(rte_eal_get_runtime_dir());
	return rc;
}

int off_probe(const char *devargs)
{
	return rte_dev_probe(devargs);
}

/* ---- memory ----------------------------------------------------------------------------------------------- */

int off_iova_is_va(void)
{
	return rte_eal_iova_mode() == RTE_IOVA_VA;
}

int off_memory_register(void *base, size_t len, size_t page_size, int unmapped)
{
	unsigned pages = (unsigned)(len / page_size);
	rte_iova_t *addresses = NULL;
	int rc;

	/* No device addresses are given: devices that can access such memory use its virtual address. */
	if (unmapped)
		pages = 0;
	else if (!off_iova_is_va()) {
		addresses = calloc(pages, sizeof(*addresses));
		if (addresses == NULL)
			return -ENOMEM;
		for (unsigned i = 0; i < pages; i++)
			addresses[i] = rte_mem_virt2phy((uint8_t *)base + i * page_size);
	}
	rc = rte_extmem_register(base, len, addresses, pages, page_size);
	if (rc != 0)
		rc = rte_errno > 0 ? -rte_errno : -EIO;
	free(addresses);
	return rc;
}

int off_memory_map_vfio(void *base, size_t len)
{
	uint64_t address = (uint64_t)(uintptr_t)base;

	if (!rte_vfio_is_enabled("vfio"))
		return -ENOTSUP;
	if (rte_vfio_container_dma_map(RTE_VFIO_DEFAULT_CONTAINER_FD, address, address, len) != 0)
		return rte_errno > 0 ? -rte_errno : -EIO;
	return 0;
}
