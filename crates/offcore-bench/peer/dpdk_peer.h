/*
 * The C side of the `dpdk-lib` peer: librte_vhost, called by burst from a thread of the benchmark.
 *
 * Most of DPDK's data path calls are static inline functions, so a C file is needed to reach them. Every function
 * returns a count or 0, or a negative errno value; none aborts the process. Functions marked "data thread" must be
 * called from the one thread that has called peer_attach(); the others from any thread.
 */
#ifndef OFFCORE_DPDK_PEER_H
#define OFFCORE_DPDK_PEER_H

#include <stdint.h>

struct rte_mbuf;
struct rte_mempool;

/* Ports (registered sockets) at a time. */
#define PEER_MAX_PORTS 8

/*
 * Starts EAL, once per process, with `mem_mb` MiB of memory on hugepages (`huge` = 1) or ordinary pages (0) and the
 * calling thread as its main lcore on CPU `lcore`. The caller's CPU affinity is the same afterwards. After a failure
 * EAL cannot be started again in this process, except after -ENXIO: the process may not run on CPU `lcore`.
 */
int peer_eal_init(int huge, unsigned lcore, unsigned mem_mb, const char *file_prefix);

/*
 * Makes the calling thread the data thread: gives it an EAL lcore number, without which it would have no mempool
 * cache. 1 when the thread must peer_detach() later, 0 when it already had a number.
 */
int peer_attach(void);
void peer_detach(void);

/* Packet pool of `mbufs` buffers of 128 + 2048 bytes with a cache of 256 per thread. */
int peer_pool_create(unsigned mbufs, const char *name, struct rte_mempool **pool);
/* Every buffer must be back in the pool. */
void peer_pool_free(struct rte_mempool *pool);
/* Size in bytes of the pages under the pool. */
int64_t peer_pool_page_size(struct rte_mempool *pool);

/*
 * Listens on a vhost-user server socket, offering librte_vhost's features less the bits of `disabled` (VIRTIO_*_F_*).
 * Returns a port number. A port serves one front end at a time; a second one is refused.
 */
int peer_register(const char *path, uint64_t disabled);
/* Disconnects the front end and removes the socket. */
int peer_unregister(unsigned port);
/*
 * Data thread. Waits until a front end has started the device and enabled the first `pairs` queue pairs, then tells
 * it not to kick, as net_vhost does: 0, or -ETIMEDOUT.
 */
int peer_wait_ready(unsigned port, unsigned pairs, unsigned timeout_ms);
/* Data thread. Touches every page of the memory that the connected front end shares: 0, or -ENODEV. */
int peer_touch(unsigned port);
/* Data thread. The feature bits that the connected front end has acknowledged, or -ENODEV. */
int peer_features(unsigned port, uint64_t *features);

/*
 * Data thread. Moves up to `max` packets from the transmit queue of the guest's queue pair into buffers of `pool`:
 * their number, or -ENODEV when no front end is connected.
 */
int peer_dequeue(unsigned port, unsigned pair, struct rte_mempool *pool, struct rte_mbuf **mbufs, unsigned max);
/*
 * Data thread. Copies packets to the receive queue of the guest's queue pair: the number that found room, or -ENODEV.
 * The buffers still belong to the caller.
 */
int peer_enqueue(unsigned port, unsigned pair, struct rte_mbuf **mbufs, unsigned count);
/*
 * Writes destination and source (6 bytes each) into every packet, by the code of testpmd's forwarding mode "mac", and
 * hands on a guest's request for a checksum, which that mode drops.
 */
void peer_mac(struct rte_mbuf **mbufs, unsigned count, const uint8_t *destination, const uint8_t *source);

/*
 * Takes `count` buffers from the pool and makes them packets of `len` bytes of stale content: 0, -ENOBUFS when the
 * pool is dry, or -EMSGSIZE when `len` does not fit into one buffer.
 */
int peer_alloc(struct rte_mempool *pool, struct rte_mbuf **mbufs, unsigned count, uint16_t len);
void peer_free(struct rte_mbuf **mbufs, unsigned count);
/* The bytes of a packet; NULL when it spans several buffers. `len` is the length of the whole packet. */
uint8_t *peer_payload(struct rte_mbuf *mbuf, uint32_t *len);

#endif
