/* See dpdk_peer.h. The data calls follow drivers/net/vhost and app/test-pmd of DPDK 22.11. */
#define _GNU_SOURCE
#include "dpdk_peer.h"

#include <errno.h>
#include <linux/membarrier.h>
#include <linux/virtio_net.h>
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <rte_eal.h>
#include <rte_errno.h>
#include <rte_ether.h>
#include <rte_ip.h>
#include <rte_lcore.h>
#include <rte_mbuf.h>
#include <rte_memory.h>
#include <rte_mempool.h>
#include <rte_prefetch.h>
#include <rte_vhost.h>

/* Maximum number of packets that librte_vhost processes per call (its MAX_PKT_BURST). */
#define VHOST_BURST 32U
#define PATH_BYTES 108
#define POOL_CACHE 256
#define NONE (-1)

struct port {
	/* ID of the running device, or NONE. librte_vhost's control thread writes it, the data thread reads it. */
	int vid;
	/* 1 while the data thread is inside librte_vhost with `vid`. */
	unsigned busy;

	/* The following fields belong to the control side and are protected by `control`. */
	bool used __rte_cache_aligned;
	int connection; /* device ID of the connected front end, running or not, or NONE */
	uint64_t enabled; /* one bit per virtqueue */
	char path[PATH_BYTES];
} __rte_cache_aligned;

static struct port ports[PEER_MAX_PORTS];
static pthread_mutex_t control = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed;

/* ---- start-up --------------------------------------------------------------------------------------------- */

static int membarrier(int command)
{
	return (int)syscall(__NR_membarrier, command, 0, 0);
}

/*
 * EAL runs its control threads, including librte_vhost's, on the CPUs that the calling thread may use, except its
 * lcore. With a pinned caller they would run on the timed core. The caller therefore temporarily gets the affinity of
 * the process's main thread in addition.
 */
static int widen_affinity(unsigned lcore)
{
	cpu_set_t set, main_set;

	CPU_ZERO(&set);
	CPU_SET(lcore, &set);
	if (pthread_setaffinity_np(pthread_self(), sizeof(set), &set) != 0)
		return -ENXIO;
	if (sched_getaffinity(getpid(), sizeof(main_set), &main_set) == 0) {
		CPU_OR(&set, &set, &main_set);
		pthread_setaffinity_np(pthread_self(), sizeof(set), &set);
	}
	return 0;
}

static int start_eal(int huge, unsigned lcore, unsigned mem_mb, const char *file_prefix)
{
	char program[] = "offcore", lcores[32], memory[16], prefix[64];
	char *argv[16];
	int argc = 0;

	snprintf(lcores, sizeof(lcores), "--lcores=0@%u", lcore);
	snprintf(memory, sizeof(memory), "-m%u", mem_mb);
	snprintf(prefix, sizeof(prefix), "--file-prefix=%s", file_prefix);
	argv[argc++] = program;
	argv[argc++] = lcores;
	argv[argc++] = memory;
	argv[argc++] = prefix;
	argv[argc++] = (char *)"--no-pci";
	argv[argc++] = (char *)"--no-telemetry";
	argv[argc++] = (char *)"--iova-mode=va";
	argv[argc++] = (char *)"--log-level=error";
	if (huge) {
		argv[argc++] = (char *)"--in-memory";
	} else {
		argv[argc++] = (char *)"--no-shconf";
		argv[argc++] = (char *)"--no-huge";
	}
	argv[argc] = NULL;
	if (rte_eal_init(argc, argv) < 0)
		return rte_errno > 0 ? -rte_errno : -EIO;
	/* The directory is empty in both modes. */
	rmdir(rte_eal_get_runtime_dir());
	return 0;
}

int peer_eal_init(int huge, unsigned lcore, unsigned mem_mb, const char *file_prefix)
{
	pthread_condattr_t attr;
	cpu_set_t before;
	int rc;

	if (lcore >= CPU_SETSIZE)
		return -ENXIO;
	/* Allows destroy_device() to synchronise with the data thread without a fence in the data thread. */
	if (membarrier(MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED) != 0)
		return -errno;
	if (pthread_getaffinity_np(pthread_self(), sizeof(before), &before) != 0)
		return -EIO;

	for (unsigned i = 0; i < PEER_MAX_PORTS; i++)
		ports[i].vid = NONE;
	pthread_condattr_init(&attr);
	pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	pthread_cond_init(&changed, &attr);
	pthread_condattr_destroy(&attr);

	rc = widen_affinity(lcore);
	if (rc == 0)
		rc = start_eal(huge, lcore, mem_mb, file_prefix);
	pthread_setaffinity_np(pthread_self(), sizeof(before), &before);
	return rc;
}

int peer_attach(void)
{
	if (rte_lcore_id() != LCORE_ID_ANY)
		return 0;
	if (rte_thread_register() != 0)
		return rte_errno > 0 ? -rte_errno : -ENOMEM;
	return 1;
}

void peer_detach(void)
{
	rte_thread_unregister();
}

int peer_pool_create(unsigned mbufs, const char *name, struct rte_mempool **pool)
{
	*pool = rte_pktmbuf_pool_create(name, mbufs, POOL_CACHE, 0, RTE_MBUF_DEFAULT_BUF_SIZE, SOCKET_ID_ANY);
	if (*pool == NULL)
		return rte_errno > 0 ? -rte_errno : -ENOMEM;
	return 0;
}

void peer_pool_free(struct rte_mempool *pool)
{
	rte_mempool_free(pool);
}

int64_t peer_pool_page_size(struct rte_mempool *pool)
{
	struct rte_mempool_memhdr *chunk = STAILQ_FIRST(&pool->mem_list);
	struct rte_memseg_list *list = chunk == NULL ? NULL : rte_mem_virt2memseg_list(chunk->addr);

	return list == NULL ? -ENOENT : (int64_t)list->page_sz;
}

/* ---- control side: sockets and devices -------------------------------------------------------------------- */

/* Returns the port whose front end is device `vid`. The caller must hold `control`. */
static struct port *port_of(int vid)
{
	for (unsigned i = 0; i < PEER_MAX_PORTS; i++) {
		if (ports[i].used && ports[i].connection == vid)
			return &ports[i];
	}
	return NULL;
}

static int new_connection(int vid)
{
	char path[PATH_BYTES];
	int rc = -1;

	if (rte_vhost_get_ifname(vid, path, sizeof(path)) != 0)
		return -1;
	pthread_mutex_lock(&control);
	for (unsigned i = 0; i < PEER_MAX_PORTS; i++) {
		if (!ports[i].used || strcmp(ports[i].path, path) != 0 || ports[i].connection != NONE)
			continue;
		ports[i].connection = vid;
		ports[i].enabled = 0;
		rc = 0;
		break;
	}
	pthread_mutex_unlock(&control);
	return rc;
}

static void destroy_connection(int vid)
{
	struct port *port;

	pthread_mutex_lock(&control);
	port = port_of(vid);
	if (port != NULL)
		port->connection = NONE;
	pthread_mutex_unlock(&control);
}

static int vring_state_changed(int vid, uint16_t vring, int enable)
{
	struct port *port;

	pthread_mutex_lock(&control);
	port = port_of(vid);
	if (port != NULL && vring < 64) {
		uint64_t bit = UINT64_C(1) << vring;

		port->enabled = enable ? port->enabled | bit : port->enabled & ~bit;
		pthread_cond_broadcast(&changed);
	}
	pthread_mutex_unlock(&control);
	return 0;
}

static void disable_kicks(int vid)
{
	uint16_t vrings = rte_vhost_get_vring_num(vid);

	for (uint16_t i = 0; i < vrings; i++)
		rte_vhost_enable_guest_notification(vid, i, 0);
}

static int new_device(int vid)
{
	struct port *port;

	disable_kicks(vid);
	pthread_mutex_lock(&control);
	port = port_of(vid);
	if (port != NULL)
		__atomic_store_n(&port->vid, vid, __ATOMIC_RELEASE);
	pthread_cond_broadcast(&changed);
	pthread_mutex_unlock(&control);
	return port == NULL ? -1 : 0;
}

/* librte_vhost frees the device after this call, so the data thread must have left it and must not enter it again. */
static void destroy_device(int vid)
{
	struct port *port;

	pthread_mutex_lock(&control);
	port = port_of(vid);
	if (port != NULL)
		__atomic_store_n(&port->vid, NONE, __ATOMIC_RELAXED);
	pthread_mutex_unlock(&control);
	if (port == NULL)
		return;
	/* Fences both sides: either the data thread sees NONE, or this thread sees its `busy`. */
	membarrier(MEMBARRIER_CMD_PRIVATE_EXPEDITED);
	while (__atomic_load_n(&port->busy, __ATOMIC_ACQUIRE) != 0)
		sched_yield();
}

static const struct rte_vhost_device_ops device_ops = {
	.new_connection = new_connection,
	.destroy_connection = destroy_connection,
	.vring_state_changed = vring_state_changed,
	.new_device = new_device,
	.destroy_device = destroy_device,
};

static int claim_port(const char *path)
{
	int found = -ENOSPC;

	pthread_mutex_lock(&control);
	for (int i = 0; i < PEER_MAX_PORTS; i++) {
		if (!ports[i].used) {
			if (found < 0)
				found = i;
		} else if (strcmp(ports[i].path, path) == 0) {
			found = -EADDRINUSE;
			break;
		}
	}
	if (found >= 0) {
		ports[found].used = true;
		ports[found].connection = NONE;
		ports[found].enabled = 0;
		snprintf(ports[found].path, sizeof(ports[found].path), "%s", path);
	}
	pthread_mutex_unlock(&control);
	return found;
}

static void release_port(int port)
{
	pthread_mutex_lock(&control);
	ports[port].used = false;
	pthread_mutex_unlock(&control);
}

int peer_register(const char *path, uint64_t disabled)
{
	int port;

	if (strlen(path) >= PATH_BYTES)
		return -ENAMETOOLONG;
	/* The clean-up after a failed bind would remove the existing socket. */
	if (access(path, F_OK) == 0)
		return -EADDRINUSE;
	port = claim_port(path);
	if (port < 0)
		return port;
	/* Offload flags that comply with the specification, like net_vhost's default. */
	if (rte_vhost_driver_register(path, RTE_VHOST_USER_NET_COMPLIANT_OL_FLAGS) != 0) {
		release_port(port);
		return -EINVAL;
	}
	if (rte_vhost_driver_disable_features(path, disabled) != 0 ||
	    rte_vhost_driver_callback_register(path, &device_ops) != 0 || rte_vhost_driver_start(path) != 0) {
		rte_vhost_driver_unregister(path);
		release_port(port);
		return -EADDRNOTAVAIL;
	}
	return port;
}

int peer_unregister(unsigned port)
{
	int rc = rte_vhost_driver_unregister(ports[port].path);

	release_port((int)port);
	return rc == 0 ? 0 : -ENOENT;
}

/* ---- data side -------------------------------------------------------------------------------------------- */

/* Prevents the device from being freed until leave(). Returns its ID, or NONE. */
static inline int enter(struct port *port)
{
	__atomic_store_n(&port->busy, 1, __ATOMIC_RELAXED);
	/* A compiler fence suffices, because destroy_device() fences the processor. */
	__atomic_signal_fence(__ATOMIC_SEQ_CST);
	return __atomic_load_n(&port->vid, __ATOMIC_ACQUIRE);
}

static inline void leave(struct port *port)
{
	__atomic_store_n(&port->busy, 0, __ATOMIC_RELEASE);
}

int peer_wait_ready(unsigned port, unsigned pairs, unsigned timeout_ms)
{
	struct port *p = &ports[port];
	uint64_t wanted = pairs >= 32 ? UINT64_MAX : (UINT64_C(1) << 2 * pairs) - 1;
	struct timespec until;
	int rc = 0, vid;

	clock_gettime(CLOCK_MONOTONIC, &until);
	until.tv_sec += timeout_ms / 1000;
	until.tv_nsec += (long)(timeout_ms % 1000) * 1000000;
	if (until.tv_nsec >= 1000000000) {
		until.tv_sec++;
		until.tv_nsec -= 1000000000;
	}
	pthread_mutex_lock(&control);
	while (rc == 0 && (p->vid == NONE || (p->enabled & wanted) != wanted))
		rc = pthread_cond_timedwait(&changed, &control, &until);
	pthread_mutex_unlock(&control);
	if (rc != 0)
		return -rc;
	/* Repeated for queue pairs that did not exist when the device started. */
	vid = enter(p);
	if (vid != NONE)
		disable_kicks(vid);
	leave(p);
	return vid == NONE ? -ENODEV : 0;
}

int peer_touch(unsigned port)
{
	struct rte_vhost_memory *table = NULL;
	struct port *p = &ports[port];
	int vid = enter(p), rc = -ENODEV;

	if (vid != NONE && rte_vhost_get_mem_table(vid, &table) == 0) {
		rc = 0;
		for (uint32_t i = 0; i < table->nregions; i++) {
			uint8_t *host = (uint8_t *)(uintptr_t)table->regions[i].host_user_addr;

			/* A write access, as in a copy, which does not change the content. */
			for (uint64_t at = 0; at < table->regions[i].size; at += 4096)
				__atomic_fetch_add(host + at, 0, __ATOMIC_RELAXED);
		}
		free(table);
	}
	leave(p);
	return rc;
}

int peer_features(unsigned port, uint64_t *features)
{
	struct port *p = &ports[port];
	int vid = enter(p), rc = -ENODEV;

	if (vid != NONE && rte_vhost_get_negotiated_features(vid, features) == 0)
		rc = 0;
	leave(p);
	return rc;
}

int peer_dequeue(unsigned port, unsigned pair, struct rte_mempool *pool, struct rte_mbuf **mbufs, unsigned max)
{
	struct port *p = &ports[port];
	int vid = enter(p);
	unsigned n = 0;

	if (unlikely(vid == NONE)) {
		leave(p);
		return -ENODEV;
	}
	while (n < max) {
		uint16_t want = RTE_MIN(max - n, VHOST_BURST);
		uint16_t got = rte_vhost_dequeue_burst(vid, 2 * pair + 1, pool, mbufs + n, want);

		n += got;
		if (got < want)
			break;
	}
	leave(p);
	return (int)n;
}

int peer_enqueue(unsigned port, unsigned pair, struct rte_mbuf **mbufs, unsigned count)
{
	struct port *p = &ports[port];
	int vid = enter(p);
	unsigned n = 0;

	if (unlikely(vid == NONE)) {
		leave(p);
		return -ENODEV;
	}
	while (n < count) {
		uint16_t want = RTE_MIN(count - n, VHOST_BURST);
		uint16_t sent = rte_vhost_enqueue_burst(vid, 2 * pair, mbufs + n, want);

		n += sent;
		if (sent < want)
			break;
	}
	leave(p);
	return (int)n;
}

/*
 * If the sender of a packet left the checksum to the device, librte_vhost reports for the received packet that it has
 * no checksum (RX_L4_CKSUM_NONE). testpmd's mode mac drops this information. A switch between guests requests the
 * checksum from the sending port, and librte_vhost then requests it in the header for the receiving guest. librte_vhost
 * has already parsed the packet.
 */
static inline uint64_t request_checksum(struct rte_mbuf *mbuf)
{
	uint64_t l4, l3;

	mbuf->l2_len = sizeof(struct rte_ether_hdr);
	mbuf->l3_len = sizeof(struct rte_ipv4_hdr);
	if ((mbuf->ol_flags & RTE_MBUF_F_RX_L4_CKSUM_MASK) != RTE_MBUF_F_RX_L4_CKSUM_NONE)
		return 0;
	l4 = (mbuf->packet_type & RTE_PTYPE_L4_MASK) == RTE_PTYPE_L4_TCP ? RTE_MBUF_F_TX_TCP_CKSUM
									 : RTE_MBUF_F_TX_UDP_CKSUM;
	l3 = RTE_MBUF_F_TX_IPV4;
	if (unlikely(RTE_ETH_IS_IPV6_HDR(mbuf->packet_type))) {
		mbuf->l3_len = sizeof(struct rte_ipv6_hdr);
		l3 = RTE_MBUF_F_TX_IPV6;
	}
	return l3 | l4;
}

void peer_mac(struct rte_mbuf **mbufs, unsigned count, const uint8_t *destination, const uint8_t *source)
{
	struct rte_ether_addr to, from;

	memcpy(&to, destination, sizeof(to));
	memcpy(&from, source, sizeof(from));
	for (unsigned i = 0; i < count; i++) {
		struct rte_mbuf *mbuf = mbufs[i];
		struct rte_ether_hdr *ether;
		uint64_t request;

		if (likely(i + 1 < count))
			rte_prefetch0(rte_pktmbuf_mtod(mbufs[i + 1], void *));
		ether = rte_pktmbuf_mtod(mbuf, struct rte_ether_hdr *);
		rte_ether_addr_copy(&to, &ether->dst_addr);
		rte_ether_addr_copy(&from, &ether->src_addr);
		request = request_checksum(mbuf);
		mbuf->ol_flags = (mbuf->ol_flags & (RTE_MBUF_F_INDIRECT | RTE_MBUF_F_EXTERNAL)) | request;
		mbuf->vlan_tci = 0;
		mbuf->vlan_tci_outer = 0;
	}
}

int peer_alloc(struct rte_mempool *pool, struct rte_mbuf **mbufs, unsigned count, uint16_t len)
{
	if (rte_pktmbuf_alloc_bulk(pool, mbufs, count) != 0)
		return -ENOBUFS;
	for (unsigned i = 0; i < count; i++) {
		if (rte_pktmbuf_append(mbufs[i], len) == NULL) {
			rte_pktmbuf_free_bulk(mbufs, count);
			return -EMSGSIZE;
		}
	}
	return 0;
}

void peer_free(struct rte_mbuf **mbufs, unsigned count)
{
	rte_pktmbuf_free_bulk(mbufs, count);
}

uint8_t *peer_payload(struct rte_mbuf *mbuf, uint32_t *len)
{
	*len = mbuf->pkt_len;
	return mbuf->nb_segs == 1 ? rte_pktmbuf_mtod(mbuf, uint8_t *) : NULL;
}
