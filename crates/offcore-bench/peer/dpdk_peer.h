/*
 * The C part of the `dpdk-lib` peer: librte_vhost, called burst by burst from a thread of the benchmark.
 *
 * Most of DPDK's data path calls are static inline functions, so a C file is needed to call them. Every function
 * returns a count or 0, or a negative errno value. No function aborts the process. Functions marked "data thread" must
 * be called from the thread that has called peer_attach(). All others may be called from any thread.
 */
#ifndef OFFCORE_DPDK_PEER_H
#define OFFCORE_DPDK_PEER_H

#include <stdint.h>

struct rte_mbuf;
struct rte_mempool;

/* Maximum number of ports (registered sockets) at a time. */
#define PEER_MAX_PORTS 8

/*
 * Starts EAL, once per process, with `mem_mb` MiB of memory on hugepages (`huge` = 1) or ordinary pages (0) and the
 * calling thread as its main lcore on CPU `lcore`. The caller's CPU affinity is preserved. After a failure
 * EAL cannot be started again in this process, except after -ENXIO, which means that the process may not run on CPU
 * `lcore`.
 */
int peer_eal_init(int huge, unsigned lcore, unsigned mem_mb, const char *file_prefix);

/*
 * Makes the calling thread the data thread: assigns an EAL lcore ID to it, without which it would have no mempool
 * cache. Returns 1 if the thread must call peer_detach() later, 0 if it already had an ID.
 */
int peer_attach(void);
void peer_detach(void);

/* Creates a packet pool of `mbufs` buffers of 128 + 2048 bytes with a cache of 256 buffers per thread. */
int peer_pool_create(unsigned mbufs, const char *name, struct rte_mempool **pool);
/* Frees a pool. All buffers must have been returned to it. */
void peer_pool_free(struct rte_mempool *pool);
/* Returns the page size of the pool's memory in bytes. */
int64_t peer_pool_page_size(struct rte_mempool *pool);

/*
 * Listens on a vhost-user server socket and offers librte_vhost's features without the bits of `disabled`
 * (VIRTIO_*_F_*). Returns a port number. A port serves one front end at a time and refuses others.
 */
int peer_register(const char *path, uint64_t disabled);
/* Disconnects the front end and removes the socket. */
int peer_unregister(unsigned port);
/*
 * Data thread. Waits until a front end has started the device and enabled the first `pairs` queue pairs, then disables
 * its kicks, like net_vhost. Returns 0 or -ETIMEDOUT.
 */
int peer_wait_ready(unsigned port, unsigned pairs, unsigned timeout_ms);
/* Data thread. Touches every page of the memory that the connected front end shares. Returns 0 or -ENODEV. */
int peer_touch(unsigned port);
/* Data thread. Reads the feature bits that the connected front end has acknowledged. Returns 0 or -ENODEV. */
int peer_features(unsigned port, uint64_t *features);

/*
 * Data thread. Moves up to `max` packets from the transmit queue of the guest's queue pair into buffers of `pool`.
 * Returns their number, or -ENODEV if no front end is connected.
 */
int peer_dequeue(unsigned port, unsigned pair, struct rte_mempool *pool, struct rte_mbuf **mbufs, unsigned max);
/*
 * Data thread. Copies packets to the receive queue of the guest's queue pair. Returns the number of copied packets,
 * which is limited by the queue's room, or -ENODEV. The buffers still belong to the caller.
 */
int peer_enqueue(unsigned port, unsigned pair, struct rte_mbuf **mbufs, unsigned count);
/*
 * Writes destination and source (6 bytes each) into every packet with the code of testpmd's forwarding mode "mac", and
 * passes on a guest's request for a checksum, which that mode drops.
 */
void peer_mac(struct rte_mbuf **mbufs, unsigned count, const uint8_t *destination, const uint8_t *source);

/*
 * Takes `count` buffers from the pool as packets of `len` bytes with stale content. Returns 0, -ENOBUFS if the
 * pool is empty, or -EMSGSIZE if `len` does not fit into one buffer.
 */
int peer_alloc(struct rte_mempool *pool, struct rte_mbuf **mbufs, unsigned count, uint16_t len);
void peer_free(struct rte_mbuf **mbufs, unsigned count);
/* Returns the bytes of a packet, or NULL if it spans several buffers. Sets `len` to the length of the whole packet. */
uint8_t *peer_payload(struct rte_mbuf *mbuf, uint32_t *len);

#endif
