/* See shim.h. */
#include "shim.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include <rte_dev.h>
#include <rte_errno.h>
#include <rte_ethdev.h>

uint64_t off_eth_rss(unsigned kinds)
{
	return (kinds & 1 ? RTE_ETH_RSS_IP : 0) | (kinds & 2 ? RTE_ETH_RSS_TCP : 0) |
	       (kinds & 4 ? RTE_ETH_RSS_UDP : 0) | (kinds & 8 ? RTE_ETH_RSS_SCTP : 0);
}

int off_eth_find(const char *name)
{
	uint16_t port;

	return rte_eth_dev_get_port_by_name(name, &port) == 0 ? port : -ENODEV;
}

int off_eth_info(uint16_t port, struct off_eth_info *info)
{
	struct rte_eth_dev_info dev;
	struct rte_ether_addr mac;
	int rc = rte_eth_dev_info_get(port, &dev);

	memset(info, 0, sizeof(*info));
	if (rc != 0)
		return rc;
	snprintf(info->driver, sizeof(info->driver), "%s", dev.driver_name == NULL ? "" : dev.driver_name);
	if (rte_eth_macaddr_get(port, &mac) == 0)
		memcpy(info->mac, &mac, sizeof(info->mac));
	if (rte_eth_dev_get_mtu(port, &info->mtu) != 0)
		info->mtu = RTE_ETHER_MTU;
	info->max_rx_queues = dev.max_rx_queues;
	info->max_tx_queues = dev.max_tx_queues;
	info->min_mtu = dev.min_mtu;
	info->max_mtu = dev.max_mtu;
	info->overhead = RTE_ETHER_HDR_LEN + RTE_ETHER_CRC_LEN;
	if (dev.max_mtu != UINT16_MAX && dev.max_rx_pktlen > dev.max_mtu &&
	    dev.max_rx_pktlen - dev.max_mtu < 64)
		info->overhead = (uint16_t)(dev.max_rx_pktlen - dev.max_mtu);
	info->rx_desc_min = dev.rx_desc_lim.nb_min;
	info->rx_desc_max = dev.rx_desc_lim.nb_max;
	info->tx_desc_min = dev.tx_desc_lim.nb_min;
	info->tx_desc_max = dev.tx_desc_lim.nb_max;
	info->rx_desc_default = dev.default_rxportconf.ring_size;
	info->tx_desc_default = dev.default_txportconf.ring_size;
	info->rx_offloads = dev.rx_offload_capa;
	info->tx_offloads = dev.tx_offload_capa;
	info->rss = dev.flow_type_rss_offloads;
	return 0;
}

/* Maps the packet buffers for devices that access memory through an IOMMU or memory keys. Others need no mapping. */
static int map(const struct rte_eth_dev_info *dev, const struct off_eth_config *config)
{
	uint64_t address = (uint64_t)(uintptr_t)config->base;

	if (dev->device == NULL || (!config->unmapped && rte_eal_iova_mode() != RTE_IOVA_VA))
		return 0;
	if (rte_dev_dma_map(dev->device, config->base, address, config->len) == 0)
		return 0;
	if (rte_errno == EEXIST || (rte_errno == ENOTSUP && !config->unmapped))
		return 0;
	return rte_errno > 0 ? -rte_errno : -EIO;
}

int off_eth_start(uint16_t port, const struct off_eth_config *config, const char **step)
{
	struct rte_eth_conf conf;
	struct rte_eth_dev_info dev;
	uint16_t rx_desc = config->rx_desc, tx_desc = config->tx_desc;
	int rc, socket = rte_eth_dev_socket_id(port);

	memset(&conf, 0, sizeof(conf));
	conf.rxmode.mtu = config->mtu;
	conf.rxmode.offloads = config->rx_offloads;
	conf.txmode.offloads = config->tx_offloads;
	if (config->rss != 0) {
		conf.rxmode.mq_mode = RTE_ETH_MQ_RX_RSS;
		conf.rx_adv_conf.rss_conf.rss_hf = config->rss;
	}
	*step = "asking what the device can do";
	rc = rte_eth_dev_info_get(port, &dev);
	if (rc != 0)
		return rc;
	*step = "mapping the packet buffers for the device";
	rc = map(&dev, config);
	if (rc != 0)
		return rc;
	*step = "configuring the device";
	rc = rte_eth_dev_configure(port, config->queues, config->queues, &conf);
	if (rc != 0)
		return rc;
	*step = "setting the numbers of descriptors";
	rc = rte_eth_dev_adjust_nb_rx_tx_desc(port, &rx_desc, &tx_desc);
	if (rc != 0)
		return rc;
	for (uint16_t queue = 0; queue < config->queues; queue++) {
		*step = "setting up an RX queue";
		rc = rte_eth_rx_queue_setup(port, queue, rx_desc, socket, NULL, config->pool);
		if (rc != 0)
			return rc;
		*step = "setting up a TX queue";
		rc = rte_eth_tx_queue_setup(port, queue, tx_desc, socket, NULL);
		if (rc != 0)
			return rc;
	}
	*step = "setting the MTU";
	rc = rte_eth_dev_set_mtu(port, config->mtu);
	/* Drivers without this call take the MTU from the configuration, or have none. */
	if (rc != 0 && rc != -ENOTSUP)
		return rc;
	*step = "starting the device";
	rc = rte_eth_dev_start(port);
	if (rc != 0)
		return rc;
	/* Errors are ignored: many virtual devices have no promiscuous mode. */
	if (config->promiscuous)
		rte_eth_promiscuous_enable(port);
	else
		rte_eth_promiscuous_disable(port);
	return 0;
}

void off_eth_close(uint16_t port, int remove)
{
	struct rte_eth_dev_info dev;
	int known = rte_eth_dev_info_get(port, &dev);

	rte_eth_dev_stop(port);
	rte_eth_dev_close(port);
	if (remove && known == 0 && dev.device != NULL)
		rte_dev_remove(dev.device);
}

int off_eth_stats(uint16_t port, struct off_eth_stats *stats)
{
	struct rte_eth_stats all;
	int rc = rte_eth_stats_get(port, &all);

	if (rc == 0) {
		stats->missed = all.imissed;
		stats->rx_errors = all.ierrors;
		stats->no_mbuf = all.rx_nombuf;
		stats->tx_errors = all.oerrors;
	}
	return rc;
}

int off_eth_link(uint16_t port, struct off_eth_link *link)
{
	struct rte_eth_link now;
	int rc = rte_eth_link_get_nowait(port, &now);

	if (rc == 0) {
		link->mbit = now.link_speed;
		link->up = now.link_status == RTE_ETH_LINK_UP;
		link->full_duplex = now.link_duplex == RTE_ETH_LINK_FULL_DUPLEX;
	}
	return rc;
}

uint16_t off_eth_rx(uint16_t port, uint16_t queue, struct rte_mbuf **mbufs, uint16_t max)
{
	return rte_eth_rx_burst(port, queue, mbufs, max);
}

uint16_t off_eth_tx(uint16_t port, uint16_t queue, struct rte_mbuf **mbufs, uint16_t count)
{
	return rte_eth_tx_burst(port, queue, mbufs, count);
}
