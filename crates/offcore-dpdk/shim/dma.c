/* See shim.h. Each device has one virtual channel: its functions may not run on two cores at a time. */
#include "shim.h"

#include <errno.h>
#include <stdbool.h>
#include <string.h>

#include <rte_dmadev.h>

#define VCHAN 0

int off_dma_find(const char *name)
{
	int dev = rte_dma_get_dev_id_by_name(name);

	return dev < 0 ? -ENODEV : dev;
}

int off_dma_info(int16_t dev, struct off_dma_info *info)
{
	struct rte_dma_info all;
	int rc = rte_dma_info_get(dev, &all);

	if (rc == 0) {
		info->capabilities = all.dev_capa;
		info->max_vchans = all.max_vchans;
		info->min_desc = all.min_desc;
		info->max_desc = all.max_desc;
		info->node = all.numa_node;
	}
	return rc;
}

int off_dma_start(int16_t dev, uint16_t desc)
{
	struct rte_dma_conf conf = { .nb_vchans = 1 };
	struct rte_dma_vchan_conf vchan = { .direction = RTE_DMA_DIR_MEM_TO_MEM, .nb_desc = desc };
	int rc = rte_dma_configure(dev, &conf);

	if (rc == 0)
		rc = rte_dma_vchan_setup(dev, VCHAN, &vchan);
	if (rc == 0)
		rc = rte_dma_start(dev);
	return rc;
}

int off_dma_stop(int16_t dev)
{
	return rte_dma_stop(dev);
}

uint16_t off_dma_capacity(int16_t dev)
{
	return rte_dma_burst_capacity(dev, VCHAN);
}

unsigned off_dma_copy(int16_t dev, const struct off_copy *ops, unsigned count)
{
	unsigned n = 0;

	while (n < count && ops[n].len > 0 &&
	       rte_dma_copy(dev, VCHAN, (rte_iova_t)(uintptr_t)ops[n].src, (rte_iova_t)(uintptr_t)ops[n].dst,
			    ops[n].len, 0) >= 0)
		n++;
	return n;
}

void off_dma_submit(int16_t dev)
{
	rte_dma_submit(dev, VCHAN);
}

uint16_t off_dma_completed(int16_t dev, uint16_t max, int *failed)
{
	uint16_t last;
	bool error = false;
	uint16_t n = rte_dma_completed(dev, VCHAN, max, &last, &error);

	*failed = error;
	return n;
}

uint16_t off_dma_statuses(int16_t dev, uint16_t max, uint32_t *statuses)
{
	enum rte_dma_status_code codes[16];
	uint16_t last, n;

	n = rte_dma_completed_status(dev, VCHAN, max < 16 ? max : 16, &last, codes);
	for (uint16_t i = 0; i < n; i++)
		statuses[i] = (uint32_t)codes[i];
	return n;
}
