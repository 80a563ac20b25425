/* See shim.h. A mempool whose objects describe the chunks of a packet pool and are allocated from that pool. */
#include "shim.h"

#include <errno.h>
#include <stdbool.h>
#include <string.h>

#include <rte_errno.h>
#include <rte_mbuf.h>
#include <rte_mempool.h>

/* The mbuf layout that convert.rs relies on. */
#define LIES_AT(field, offset) \
	_Static_assert(offsetof(struct rte_mbuf, field) == (offset), #field " is elsewhere in this DPDK's mbufs")
LIES_AT(buf_addr, 0);
LIES_AT(data_off, 16);
LIES_AT(refcnt, 18);
LIES_AT(nb_segs, 20);
LIES_AT(port, 22);
LIES_AT(ol_flags, 24);
LIES_AT(packet_type, 32);
LIES_AT(pkt_len, 36);
LIES_AT(data_len, 40);
LIES_AT(next, 64);
_Static_assert(sizeof(struct rte_mbuf) == 128, "mbufs are longer in this DPDK");

/* ---- operations ------------------------------------------------------------------------------------------- */

static int ops_alloc(struct rte_mempool *pool)
{
	pool->pool_data = pool->pool_config;
	return 0;
}

static int ops_enqueue(struct rte_mempool *pool, void *const *objects, unsigned count)
{
	return offcore_dpdk_enqueue(pool->pool_data, (struct rte_mbuf *const *)objects, count);
}

static int ops_dequeue(struct rte_mempool *pool, void **objects, unsigned count)
{
	return offcore_dpdk_dequeue(pool->pool_data, (struct rte_mbuf **)objects, count);
}

static unsigned ops_count(const struct rte_mempool *pool)
{
	return offcore_dpdk_count(pool->pool_data);
}

static int register_ops(void)
{
	static const struct rte_mempool_ops ops = {
		.name = "offcore",
		.alloc = ops_alloc,
		.enqueue = ops_enqueue,
		.dequeue = ops_dequeue,
		.get_count = ops_count,
	};
	static bool registered;
	int rc = 0;

	if (!registered)
		rc = rte_mempool_register_ops(&ops);
	registered = rc >= 0;
	return rc < 0 ? rc : 0;
}

/* ---- creation --------------------------------------------------------------------------------------------- */

struct fill {
	const struct off_pool_config *config;
	uint8_t *first;
	size_t stride;
	unsigned count;
	bool apart;
};

void off_mbuf_restore(struct rte_mbuf *mbuf, uint8_t *buffer, unsigned len, int unmapped)
{
	mbuf->buf_addr = buffer;
	if (unmapped || rte_eal_iova_mode() == RTE_IOVA_VA)
		rte_mbuf_iova_set(mbuf, (rte_iova_t)(uintptr_t)buffer);
	else
		rte_mbuf_iova_set(mbuf, rte_mem_virt2phy(buffer));
	mbuf->buf_len = (uint16_t)len;
}

static void free_nothing(void *buffer, void *opaque)
{
	(void)buffer;
	(void)opaque;
}

/* Shared by all external buffers: each belongs to one mbuf and is freed with it. */
static struct rte_mbuf_ext_shared_info never_shared = { .free_cb = free_nothing, .refcnt = 1 };

static void init_mbuf(struct rte_mempool *pool, void *opaque, void *object, unsigned index)
{
	struct fill *fill = opaque;
	const struct off_pool_config *config = fill->config;
	struct rte_mbuf *mbuf = object;

	if (index == 0)
		fill->first = object;
	if ((uint8_t *)object != fill->first + index * fill->stride)
		fill->apart = true;
	memset(mbuf, 0, sizeof(*mbuf));
	off_mbuf_restore(mbuf, config->base + (size_t)index * config->chunk_size, config->chunk_size,
			 config->unmapped);
	mbuf->data_off = RTE_PKTMBUF_HEADROOM;
	mbuf->pool = pool;
	mbuf->nb_segs = 1;
	mbuf->port = RTE_MBUF_PORT_INVALID;
	rte_mbuf_refcnt_set(mbuf, 1);
	if (config->external) {
		mbuf->shinfo = &never_shared;
		mbuf->ol_flags = RTE_MBUF_F_EXTERNAL;
	}
	fill->count++;
}

static size_t stride(void)
{
	struct rte_mempool_objsz size;

	return rte_mempool_calc_obj_size(sizeof(struct rte_mbuf), RTE_MEMPOOL_F_NO_SPREAD, &size);
}

size_t off_pool_headers_len(unsigned chunks)
{
	return chunks * stride() + RTE_MEMPOOL_ALIGN;
}

static int populate(struct rte_mempool *pool, const struct off_pool_config *config, struct rte_mbuf **first)
{
	/*
	 * Drivers that register buffers themselves (mlx5) take external buffers from the mbufs, and other buffers from
	 * the mempool's memory.
	 */
	struct rte_pktmbuf_pool_private private = {
		.mbuf_data_room_size = (uint16_t)config->chunk_size,
		.flags = config->external ? RTE_PKTMBUF_POOL_F_PINNED_EXT_BUF : 0,
	};
	struct fill fill = { .config = config, .stride = stride() };
	int rc = rte_mempool_set_ops_byname(pool, "offcore", config->owner);

	if (rc < 0)
		return rc;
	rte_pktmbuf_pool_init(pool, &private);
	rc = rte_mempool_populate_iova(pool, config->headers, RTE_BAD_IOVA, config->headers_len, NULL, NULL);
	if (rc < 0)
		return rc;
	rte_mempool_obj_iter(pool, init_mbuf, &fill);
	if (fill.count != config->chunks || fill.apart)
		return -EPROTO;
	*first = (struct rte_mbuf *)fill.first;
	return 0;
}

int off_pool_create(const struct off_pool_config *config, struct rte_mempool **pool, struct rte_mbuf **first,
		    size_t *stride_out)
{
	/* Mbufs are contiguous in virtual memory only, because devices do not access them. */
	unsigned flags = RTE_MEMPOOL_F_NO_SPREAD | RTE_MEMPOOL_F_NO_IOVA_CONTIG;
	struct rte_mempool *made;
	int rc = register_ops();

	if (rc < 0)
		return rc;
	made = rte_mempool_create_empty(config->name, config->chunks, sizeof(struct rte_mbuf), 0,
					sizeof(struct rte_pktmbuf_pool_private), SOCKET_ID_ANY, flags);
	if (made == NULL)
		return rte_errno > 0 ? -rte_errno : -ENOMEM;
	rc = populate(made, config, first);
	if (rc < 0) {
		rte_mempool_free(made);
		return rc;
	}
	*pool = made;
	*stride_out = stride();
	return 0;
}

int off_pool_alloc(struct rte_mempool *pool, struct rte_mbuf **mbufs, unsigned count)
{
	if (rte_pktmbuf_alloc_bulk(pool, mbufs, count) != 0)
		return -ENOBUFS;
	for (unsigned i = 0; i < count; i++)
		mbufs[i]->data_len = mbufs[i]->pkt_len = 60;
	return 0;
}

void off_mbuf_free(struct rte_mbuf *mbuf)
{
	rte_pktmbuf_free(mbuf);
}
