/* The DPDK functions that Rust calls, in bursts only. They return a count or 0, or a negative errno value. */
#ifndef OFFCORE_DPDK_SHIM_H
#define OFFCORE_DPDK_SHIM_H

#include <stddef.h>
#include <stdint.h>

struct rte_mbuf;
struct rte_mempool;

/* ---- in Rust ---------------------------------------------------------------------------------------------- */

/* Receives a line that DPDK logged, without the newline; `level` is one of RTE_LOG_*. */
void offcore_dpdk_log(uint32_t level, const char *line, size_t len);
/* The mempool's operations: `pool` is the owner that off_pool_create() was given. Dequeue takes all or nothing. */
int offcore_dpdk_dequeue(void *pool, struct rte_mbuf **mbufs, unsigned count);
int offcore_dpdk_enqueue(void *pool, struct rte_mbuf *const *mbufs, unsigned count);
unsigned offcore_dpdk_count(const void *pool);

/* ---- EAL (eal.c) ------------------------------------------------------------------------------------------ */

/*
 * Starts the EAL. Its output meanwhile goes to the file `said`. Threads of the EAL receive no signals; the calling
 * thread keeps its affinity.
 */
int off_eal_init(int argc, char **argv, int said);
/* Probes one device: `NAME[,ARGS]`. */
int off_probe(const char *devargs);
/* Returns whether devices use virtual addresses. */
int off_iova_is_va(void);
/* Registers memory with DPDK; `unmapped`: the CPU has no address for it. */
int off_memory_register(void *base, size_t len, size_t page_size, int unmapped);
/* Maps registered memory for the devices of vfio; -ENOTSUP if vfio is not in use. */
int off_memory_map_vfio(void *base, size_t len);

/* ---- packet buffers (pool.c) ------------------------------------------------------------------------------ */

struct off_pool_config {
	const char *name;
	void *owner; /* passed to offcore_dpdk_dequeue() and the other operations */
	unsigned chunks;
	unsigned chunk_size; /* at most 32768 */
	uint8_t *base; /* address of the chunks */
	int external;  /* the chunks are in a device's memory, not in the pool's ... */
	int unmapped;  /* ... and the CPU has no address for it */
	size_t page_size;
	void *headers; /* memory for the mbufs */
	size_t headers_len;
};

/* Returns the number of bytes of `headers` that `chunks` mbufs take. */
size_t off_pool_headers_len(unsigned chunks);
/* Creates a mempool whose mbuf i, `stride` bytes after mbuf i - 1, describes chunk i. */
int off_pool_create(const struct off_pool_config *config, struct rte_mempool **pool, struct rte_mbuf **first,
		    size_t *stride);
/* Allocates mbufs with 60 bytes of data each, as a driver does. */
int off_pool_alloc(struct rte_mempool *pool, struct rte_mbuf **mbufs, unsigned count);
void off_mbuf_free(struct rte_mbuf *mbuf);
/* Points an unused mbuf at the buffer at this address; `unmapped` as above. */
void off_mbuf_restore(struct rte_mbuf *mbuf, uint8_t *buffer, unsigned len, int unmapped);

/* ---- network devices (eth.c) ------------------------------------------------------------------------------ */

struct off_eth_info {
	char driver[64];
	uint8_t mac[6];
	uint16_t max_rx_queues, max_tx_queues;
	uint16_t mtu, min_mtu, max_mtu;
	uint16_t overhead; /* bytes of a frame in addition to its MTU */
	uint16_t rx_desc_min, rx_desc_max, tx_desc_min, tx_desc_max;
	uint16_t rx_desc_default, tx_desc_default; /* 0: any */
	uint64_t rx_offloads, tx_offloads, rss;
};

struct off_eth_config {
	uint16_t queues, rx_desc, tx_desc, mtu;
	uint64_t rx_offloads, tx_offloads, rss;
	int promiscuous;
	struct rte_mempool *pool;
	void *base; /* address of the packet buffers, to map for the device */
	size_t len;
	int unmapped; /* only devices that have mapped the buffers can access them */
};

struct off_eth_stats {
	uint64_t missed, rx_errors, no_mbuf, tx_errors;
};

struct off_eth_link {
	uint32_t mbit;
	int up, full_duplex;
};

/* Returns the hash functions for the bits of `kinds`: bit 0 stands for IP, 1 for TCP, 2 for UDP, 3 for SCTP. */
uint64_t off_eth_rss(unsigned kinds);
/* Returns the port of the device `name`, or -ENODEV. */
int off_eth_find(const char *name);
int off_eth_info(uint16_t port, struct off_eth_info *info);
/* Configures and starts the device; `step` names the step that failed. */
int off_eth_start(uint16_t port, const struct off_eth_config *config, const char **step);
/* Stops and closes the device; with `remove`, removes it from the EAL. */
void off_eth_close(uint16_t port, int remove);
int off_eth_stats(uint16_t port, struct off_eth_stats *stats);
int off_eth_link(uint16_t port, struct off_eth_link *link);
uint16_t off_eth_rx(uint16_t port, uint16_t queue, struct rte_mbuf **mbufs, uint16_t max);
uint16_t off_eth_tx(uint16_t port, uint16_t queue, struct rte_mbuf **mbufs, uint16_t count);

/* ---- DMA devices (dma.c) ---------------------------------------------------------------------------------- */

struct off_dma_info {
	uint64_t capabilities;
	uint16_t max_vchans, min_desc, max_desc;
	int16_t node;
};

/* Has the layout of offcore_dma::channel::CopyOp. */
struct off_copy {
	const void *src;
	void *dst;
	uint32_t len, token;
};

int off_dma_find(const char *name);
int off_dma_info(int16_t dev, struct off_dma_info *info);
int off_dma_start(int16_t dev, uint16_t desc);
int off_dma_stop(int16_t dev);
uint16_t off_dma_capacity(int16_t dev);
/* Enqueues copies up to the first one that is refused or has length 0. */
unsigned off_dma_copy(int16_t dev, const struct off_copy *ops, unsigned count);
void off_dma_submit(int16_t dev);
/* Returns how many operations have completed, up to `max` or the first failed one; then `*failed` is set. */
uint16_t off_dma_completed(int16_t dev, uint16_t max, int *failed);
/* Like off_dma_completed(), with a status for each operation. */
uint16_t off_dma_statuses(int16_t dev, uint16_t max, uint32_t *statuses);

#endif
